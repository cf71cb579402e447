"""Parent, core and edges as processes, a fake worker in this one: who ends when who is stopped or dies."""

import asyncio
import hashlib
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import grpc
import psutil
import pytest

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from protos.forwardplane.v1.generate_pb2 import AbortRequest, GenerateRequest, TokenPrompt
from protos.forwardplane.v1.generate_pb2_grpc import GenerationServiceStub
from protos.forwardplane.v1.sampling_pb2 import StopParameters
from protos.service.lifecycle import ExitCode
from protos.service.status import from_rpc_error
from protos.wire.errors import RequestAborted, UnavailableError, UnknownRequest
from scheduler_svc.core.events import Sampling
from tests.support.core_harness import make_spec, oracle, small_info
from tests.support.core_process import ROOT, free_port, write_model_folder
from tests.support.fake_worker_server import FakeWorkerServer
from tests.support.tiny_tokenizer import byte_level_tokenizer

LIMIT_S = 60.0


class Scheduler:
    def __init__(self, process, *, port):
        self.process = process
        self.port = port
        self.target = f"127.0.0.1:{port}"

    def child(self, role):
        for process in psutil.Process(self.process.pid).children(recursive=True):
            arguments = process.cmdline()
            if "--role" in arguments and arguments[arguments.index("--role") + 1] == role:
                return process
        return None

    def family(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    async def ended(self):
        async with asyncio.timeout(LIMIT_S):
            return await self.process.wait()

    async def _listens(self):
        """A refused connection makes a gRPC channel wait longer and longer, so this asks first."""
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except ConnectionError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return

    async def answer(self, spec):
        """Its tokens, as soon as the service answers."""
        options = GenerateOptions(max_tokens=spec.max_tokens, temperature=0.0, ignore_eos=True)
        prompt = TokenIds(tuple(spec.prompt_ids.tolist()))
        async with asyncio.timeout(LIMIT_S), AsyncGenerationClient(self.target) as client:
            while True:
                await self._listens()
                try:
                    (generation,) = await client.generate([prompt], options)
                except UnavailableError:
                    await asyncio.sleep(0.05)
                else:
                    return list(generation.token_ids)


@asynccontextmanager
async def scheduler(tmp_path, *, flags=(), port=None, own_group=False, num_pages=257):
    tokenizer = byte_level_tokenizer().to_str().encode()
    info = small_info(num_pages=num_pages, logits_width=byte_level_tokenizer().get_vocab_size())
    fingerprints = replace(info.fingerprints, tokenizer=hashlib.sha256(tokenizer).hexdigest())
    server = FakeWorkerServer(replace(info, fingerprints=fingerprints))
    address = await server.start()
    model = write_model_folder(tmp_path / "model", server.info)
    (model / "tokenizer.json").write_bytes(tokenizer)
    port = port or free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scheduler_svc", "--model", str(model), "--workers", address, "--port", str(port)),
        *("--health-port", "0", "--metrics-port", "0", "--edge-metrics-port", "0", "--socket-dir", str(tmp_path)),
        *("--drain-timeout-s", "30", "--log-level", "warning", *flags),
        cwd=ROOT,
        start_new_session=own_group,
    )
    left = []
    try:
        yield Scheduler(process, port=port), server
    finally:
        if process.returncode is None:
            left = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            await process.wait()
        await asyncio.to_thread(psutil.wait_procs, left, LIMIT_S)
        await server.stop()


def greedy(stream_id, **changes):
    return make_spec(stream_id, sampling=Sampling(), **changes)


async def gone(processes):
    """Whether all of them end within the limit."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, LIMIT_S)
    return not alive


async def test_a_stop_lets_streams_finish_and_leaves_nothing(tmp_path):
    async with scheduler(tmp_path) as (service, server):
        assert await service.answer(greedy(1)) == oracle(server.info, greedy(1))
        group = os.getpgid(service.process.pid)
        assert {os.getpgid(process.pid) for process in service.family()} == {group}
        spec = greedy(2, prompt=20, max_tokens=600)
        stream = asyncio.create_task(service.answer(spec))
        while not server.worker.executed[-1].rows.seq_lens.max() > 40:
            await asyncio.sleep(0.005)
        family = service.family()
        service.process.send_signal(signal.SIGTERM)
        assert await stream == oracle(server.info, spec)
        assert await service.ended() == 0
        assert await gone(family)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_of_the_whole_group_is_as_orderly(tmp_path, number):
    async with scheduler(tmp_path, flags=("--edges", "2"), own_group=True) as (service, server):
        assert await service.answer(greedy(1)) == oracle(server.info, greedy(1))
        spec = greedy(2, prompt=20, max_tokens=600)
        stream = asyncio.create_task(service.answer(spec))
        while not server.worker.executed[-1].rows.seq_lens.max() > 40:
            await asyncio.sleep(0.005)
        family = service.family()
        os.killpg(service.process.pid, number)
        assert await stream == oracle(server.info, spec)
        assert await service.ended() == 0
        assert await gone(family)


async def test_a_child_stops_on_its_parents_word_only(tmp_path):
    async with scheduler(tmp_path) as (service, server):
        await service.answer(greedy(1))
        children = [service.child("core"), service.child("edge")]
        for child in children:
            child.send_signal(signal.SIGTERM)
            child.send_signal(signal.SIGINT)
        await asyncio.sleep(0.5)
        assert await service.answer(greedy(2)) == oracle(server.info, greedy(2))
        assert [service.child("core").pid, service.child("edge").pid] == [child.pid for child in children]
        service.process.send_signal(signal.SIGTERM)
        assert await service.ended() == 0


async def test_a_dead_edge_is_replaced_and_its_requests_are_cancelled(tmp_path):
    async with scheduler(tmp_path) as (service, server):
        await service.answer(greedy(1))
        edge, core = service.child("edge"), service.child("core")
        server.released.clear()
        lost = asyncio.create_task(service.answer(greedy(2)))
        await asyncio.sleep(0.3)
        edge.kill()
        await asyncio.sleep(0.1)
        server.released.set()
        assert await lost == oracle(server.info, greedy(2)), "asked again of the new edge"
        assert service.child("edge").pid != edge.pid
        assert service.child("core").pid == core.pid
        async with AsyncGenerationClient(service.target) as client:
            load = await client.load()
        assert (load.requests_running, load.requests_waiting) == (0, 0)


async def test_a_dead_core_ends_everything_non_zero(tmp_path):
    async with scheduler(tmp_path) as (service, _):
        await service.answer(greedy(1))
        family = service.family()
        service.child("core").kill()
        assert await service.ended() != 0
        assert await gone(family)


async def test_children_do_not_outlive_a_killed_parent(tmp_path):
    async with scheduler(tmp_path) as (service, _):
        await service.answer(greedy(1))
        family = service.family()
        assert len(family) >= 2
        service.process.kill()
        assert await gone(family)


async def test_ctrl_c_in_the_whole_group_is_an_orderly_stop(tmp_path):
    async with scheduler(tmp_path) as (service, _):
        await service.answer(greedy(1))
        family = service.family()
        for process in (psutil.Process(service.process.pid), service.child("core"), service.child("edge")):
            process.send_signal(signal.SIGINT)
        assert await service.ended() == 0
        assert await gone(family)


async def http_status(port, path):
    """Over a connection of its own, which the kernel gives to one of the edges."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    reply = await reader.read()
    writer.close()
    return int(reply.split()[1])


async def test_two_edges_share_their_ports(tmp_path):
    http_port = free_port()
    async with scheduler(tmp_path, flags=("--edges", "2", "--http-port", str(http_port))) as (service, server):
        answers = [await service.answer(greedy(index)) for index in range(1, 9)]
        assert answers == [oracle(server.info, greedy(index)) for index in range(1, 9)]
        assert [await http_status(http_port, "/health") for _ in range(8)] == [200] * 8
        service.process.send_signal(signal.SIGTERM)
        assert await service.ended() == 0


async def rest_of(call):
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_an_abort_reaches_a_request_whichever_edge_has_it(tmp_path):
    """Eight connections, which the kernel gives to both edges; one of them aborts the requests of all."""
    async with (
        scheduler(tmp_path, flags=("--edges", "2"), num_pages=2001) as (service, server),
        AsyncExitStack() as stack,
    ):
        await service.answer(greedy(1))
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(service.target, options=options) for _ in range(8)]
        for channel in channels:
            stack.push_async_callback(channel.close)
        stubs = [GenerationServiceStub(channel) for channel in channels]
        request = GenerateRequest(tokens=TokenPrompt(ids=[1, 2]), stop=StopParameters(max_tokens=900, ignore_eos=True))
        calls = [stub.Generate(request) for stub in stubs]
        names = [(await call.read()).request_id for call in calls]
        server.released.clear()
        for name in names:
            await stubs[0].Abort(AbortRequest(request_id=name), timeout=5)
        for call in calls:
            with pytest.raises(grpc.RpcError) as ended:
                await rest_of(call)
            assert isinstance(from_rpc_error(ended.value), RequestAborted)
        with pytest.raises(grpc.RpcError) as again:
            await stubs[1].Abort(AbortRequest(request_id=names[0]), timeout=5)
        assert isinstance(from_rpc_error(again.value), UnknownRequest)
        server.released.set()
        service.process.send_signal(signal.SIGTERM)
        assert await service.ended() == 0


@pytest.mark.parametrize("edges", ["1", "2"])
async def test_a_port_in_use_ends_everything_with_its_own_code(tmp_path, edges):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        async with scheduler(tmp_path, flags=("--edges", edges), port=holder.getsockname()[1]) as (service, _):
            assert await service.ended() == ExitCode.CANNOT_LISTEN
