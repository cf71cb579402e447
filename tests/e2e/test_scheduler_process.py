"""The core process for real, with a fake worker and the edge's end of the bridge in this process."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import psutil
import pytest

from protos.forwardplane.v1.bridge_pb2 import CancelStream, ResolvedSampling, SubmitStream
from protos.forwardplane.v1.sampling_pb2 import FINISH_REASON_LENGTH
from protos.service.lifecycle import ExitCode
from scheduler_svc.bridge.client import BridgeClient
from scheduler_svc.bridge.next_tokens import next_tokens_from_message
from scheduler_svc.bridge.parent_watch import STOP_ORDER
from tests.support.core_harness import make_spec, oracle, small_info
from tests.support.core_process import LIMIT_S, CoreProcess, write_model_folder
from tests.support.fake_worker_server import FakeWorkerServer


class Edge:
    """The edge's end: submits, and collects updates by stream."""

    def __init__(self, client):
        self.client = client
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, object] = {}
        self.models = []
        self.loads = []
        self.is_over = False

    async def take(self):
        async with asyncio.timeout(LIMIT_S):
            message = await self.client.receive()
        if message is None:
            self.is_over = True
            return
        if message.HasField("model"):
            self.models.append(message.model)
        if message.HasField("load"):
            self.loads.append(message.load)
        for stream_id, position, token in next_tokens_from_message(message.next_tokens):
            tokens = self.tokens.setdefault(stream_id, [])
            assert position == len(tokens)
            tokens.append(token)
        for update in message.updates:
            tokens = self.tokens.setdefault(update.stream_id, [])
            assert not update.token_ids or update.first_pos == len(tokens)
            tokens.extend(np.frombuffer(update.token_ids, "<i4").tolist())
            if update.HasField("finish") or update.HasField("error"):
                assert update.stream_id not in self.ends
                self.ends[update.stream_id] = update

    async def until(self, holds):
        while not holds():
            assert not self.is_over
            await self.take()

    async def serving(self):
        await self.until(lambda: self.models and self.models[-1].serving)

    def submit(self, spec):
        self.client.submit(
            SubmitStream(
                stream_id=spec.stream.stream_id,
                request_id=spec.request_id,
                prompt_ids=spec.prompt_ids.astype("<i4").tobytes(),
                sampling=ResolvedSampling(top_p=1.0, repetition_penalty=1.0),
                max_tokens=spec.max_tokens,
                deadline_ms=60_000,
            )
        )


@asynccontextmanager
async def edge_of(core, index=0):
    client = BridgeClient(core.socket_path, edge_index=index)
    await client.connect(timeout_s=LIMIT_S)
    try:
        yield Edge(client)
    finally:
        await client.close()


@asynccontextmanager
async def core_and_worker(tmp_path, *, flags=(), info=None):
    server = FakeWorkerServer(info or small_info(num_pages=257))
    address = await server.start()
    folder = tmp_path / "run"
    folder.mkdir()
    model = write_model_folder(tmp_path / "model", server.info)
    try:
        async with CoreProcess(folder, model=model, workers=address, flags=flags) as core:
            yield core, server
    finally:
        await server.stop()


async def test_streams_of_two_edges_run_together_and_the_core_stops_cleanly(tmp_path):
    async with core_and_worker(tmp_path) as (core, server):
        async with edge_of(core) as first, edge_of(core, 1) as second:
            await first.serving()
            await second.serving()
            specs = [make_spec(index, prompt=3 + 5 * index, max_tokens=6 + index) for index in range(1, 9)]
            for spec in specs:
                first.submit(spec)
                second.submit(spec)
            expected = {spec.stream.stream_id: oracle(server.info, spec) for spec in specs}
            for edge in (first, second):
                await edge.until(lambda edge=edge: len(edge.ends) == len(specs))
                assert edge.tokens == expected
                assert {update.finish.reason for update in edge.ends.values()} == {FINISH_REASON_LENGTH}
            first.client.ask_load()
            await first.until(lambda: first.loads)
            assert (first.loads[0].requests_running, first.loads[0].workers[0].pages_used) == (0, 0)
            assert await core.metric("requests_finished_total", reason="length") == 2 * len(specs)
            assert await core.metric("kv_pages_used") == 0
            assert await core.metric("worker_up", worker=f"{first.loads[0].workers[0].name}") == 1
            assert await core.metric("plan_rtt_seconds_count", worker=first.loads[0].workers[0].name) > 0
            core.process.send_signal(STOP_ORDER)
            await asyncio.sleep(0.1)
            assert core.process.returncode is None, "the core waits for its edges"
        assert await core.ended() == 0
        assert not core.socket_path.exists()


async def test_an_edge_that_vanishes_leaves_nothing_behind(tmp_path):
    async with core_and_worker(tmp_path) as (core, server), edge_of(core, 1) as other:
        await other.serving()
        server.released.clear()
        async with edge_of(core) as edge:
            edge.submit(make_spec(1, prompt=20))
            other.submit(make_spec(1, prompt=list(range(20)), max_tokens=3))
            while await core.metric("requests_running") != 2:
                await asyncio.sleep(0.01)
        while await core.metric("requests_finished_total", reason="abort") != 1:
            await asyncio.sleep(0.01)
        assert await core.metric("requests_running") == 1
        other.client.cancel(CancelStream(stream_id=1))
        await other.until(lambda: 1 in other.ends)
        assert await core.metric("kv_pages_used") == 0


async def test_plan_streams_that_break_are_opened_again_within_the_term(tmp_path):
    async with core_and_worker(tmp_path) as (core, server), edge_of(core) as edge:
        await edge.serving()
        spec = make_spec(1, prompt=9, max_tokens=200)
        edge.submit(spec)
        await edge.until(lambda: len(edge.tokens.get(1, ())) > 20)
        server.break_streams()
        await edge.until(lambda: 1 in edge.ends)
        assert edge.tokens[1] == oracle(server.info, spec)
        assert server.attaches == [(1, 1)]


async def test_another_scheduler_ends_this_one_with_a_clear_status(tmp_path):
    async with core_and_worker(tmp_path) as (core, server), edge_of(core) as edge:
        await edge.serving()
        edge.submit(make_spec(1, max_tokens=10_000 // 16))
        await edge.until(lambda: len(edge.tokens.get(1, ())) > 5)
        server.highest = (9, 1)
        await edge.until(lambda: 1 in edge.ends)
        assert edge.ends[1].error.reason == "UNAVAILABLE"
        assert await core.ended() == ExitCode.FAULT


async def test_the_core_dies_with_its_parent(tmp_path):
    async with core_and_worker(tmp_path) as (core, _), edge_of(core) as edge:
        await edge.serving()
        core.cut_lifeline()
        assert await core.ended() != 0
        while not edge.is_over:
            await edge.take()


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--model", "/absent/model"), ExitCode.BAD_INPUT, b"INVALID_MODEL_FILE"),
        (("--epoch-source", "file"), 78, b"epoch_file"),
        (("--workers", "nowhere"), 78, b"workers"),
    ],
)
async def test_what_the_core_cannot_run_with_is_said_in_its_exit_code(tmp_path, flags, code, said):
    async with core_and_worker(tmp_path, flags=flags) as (core, _):
        assert await core.ended() == code
        assert said in core.log
        assert b"Traceback" not in core.log


async def test_an_idle_core_uses_next_to_no_cpu(tmp_path):
    async with core_and_worker(tmp_path, flags=("--report-interval-ms", "250")) as (core, _), edge_of(core) as edge:
        await edge.serving()
        process = psutil.Process(core.process.pid)
        await asyncio.sleep(0.5)
        before = process.cpu_times()
        await asyncio.sleep(4.0)
        after = process.cpu_times()
    used = (after.user + after.system) - (before.user + before.system)
    assert used <= 0.04, f"{used} s of CPU in 4 s"
