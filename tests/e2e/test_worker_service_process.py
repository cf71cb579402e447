"""The worker service as a process: signals, exit codes, a clear line for what an operator must change, idleness."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import urllib.request
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.service.lifecycle import ExitCode
from protos.wire.errors import DeviceFault, Draining
from tests.support.plans import extend, make_info, make_plan
from tests.support.tiny_llama import Shape, gguf_content, parameters, tiny_folder
from tests.support.worker_client import WorkerClient
from worker_svc.rpc.worker_status import SERVICE_NAME

ROOT = Path(__file__).resolve().parents[2]
PORTS = ("metrics", "health", "listening")


class Worker:
    """A child process and the ports it said it has."""

    def __init__(self, process):
        self.process = process
        self.ports = {}
        self.lines = []

    async def logged(self, event):
        """Read the log until a line says `event`; that line."""
        while line := await self.process.stderr.readline():
            self.lines.append(line.decode())
            entry = json.loads(line)
            if entry["event"] in PORTS:
                self.ports[entry["event"]] = entry["port"]
            if entry["event"] == event:
                return entry
        raise AssertionError(f"{event!r} was not logged: {self.lines}")

    async def ended(self):
        """The exit code, with the rest of the log in `lines`."""
        async with asyncio.timeout(30):
            self.lines += (await self.process.stderr.read()).decode().splitlines()
            return await self.process.wait()

    async def health(self, name=SERVICE_NAME):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.ports['health']}") as channel:
            request = health_pb2.HealthCheckRequest(service=name)
            reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
            return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


@contextlib.asynccontextmanager
async def started(*arguments, module="tests.support.fake_worker_process"):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORWARDPLANE_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module),
        *("--host", "127.0.0.1", "--port", "0", "--health-port", "0", "--metrics-port", "0", "--log-format", "json"),
        *arguments,
        cwd=ROOT,
        env=environment,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Worker(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def plan_stream(worker):
    client = WorkerClient(worker.ports["listening"])
    await client.attach()
    stream, _ = await client.open()
    try:
        yield stream
    finally:
        await client.close()


def plan(seq):
    return make_plan([extend(0, 5)], seq=seq, info=make_info())


async def test_a_worker_serves_counts_and_leaves_in_order_on_sigterm():
    async with started() as worker:
        loaded = await worker.logged("worker loaded")
        assert (loaded["device"], loaded["numerics"], loaded["kernels"]) == ("cpu", "reproducible", "torch")
        assert await worker.health() == "SERVING"
        async with plan_stream(worker) as stream:
            for seq in (1, 2, 3):
                await stream.run(plan(seq))
            metrics = await asyncio.to_thread(scrape, worker.ports["metrics"])
            assert metrics['forwardplane_worker_plans_total{outcome="executed"}'] == 3
            assert metrics['forwardplane_worker_graph_misses_total{phase="prefill",reason="disabled"}'] == 3
            assert metrics["forwardplane_worker_idle_seconds_total"] > 0
            worker.process.send_signal(signal.SIGTERM)
            assert (await stream.read()).HasField("drain")
            with pytest.raises(Draining):
                await stream.read()
            assert await worker.ended() == ExitCode.OK


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


async def test_probes_and_scrapes_are_answered_while_a_worker_loads_and_sigterm_ends_the_load():
    async with started("slow=60") as worker:
        await worker.logged("listening")
        assert (await worker.health(), await worker.health("")) == ("NOT_SERVING", "SERVING")
        metrics = await asyncio.to_thread(scrape, worker.ports["metrics"])
        assert metrics["forwardplane_worker_fatal_errors_total"] == 0
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.ended() == ExitCode.OK


async def test_a_device_fault_ends_the_process_with_its_own_code():
    async with started("fault=2") as worker:
        await worker.logged("worker loaded")
        async with plan_stream(worker) as stream:
            await stream.run(plan(1))
            await stream.send(plan(2))
            with pytest.raises(DeviceFault):
                await stream.read()
            assert await worker.ended() == ExitCode.FAULT
        assert "Traceback" not in "".join(worker.lines)


async def test_a_port_in_use_is_one_clear_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flag in ("--port", "--health-port", "--metrics-port"):
            async with started(flag, str(port)) as worker:
                assert await worker.ended() == ExitCode.CANNOT_LISTEN
                errors = [line for line in worker.lines if '"error"' in line]
                assert len(errors) == 1
                assert f"port {port} is in use on 127.0.0.1" in errors[0]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--model", "no-such-model"), ExitCode.BAD_INPUT, "no-such-model is not a model folder"),
        (("--page-size", "0", "--max-rows", "many"), 78, "page_size = 0"),
        (("--numerics", "reproducible", "--dtype", "bfloat16"), 78, "numerics reproducible needs dtype float32"),
        (("--numm-pages", "8"), 78, "did you mean --num-pages?"),
        (("--numerics", "reproducible", "--prefill-attention", "torch"), 78, "depend on the batch, numerics are rep"),
        (("--device", "cuda"), 78, "device = cuda: no CUDA device"),
    ],
)
async def test_what_an_operator_must_change_is_one_clear_line(arguments, code, says, tmp_path):
    async with started(*arguments, "--model-cache", str(tmp_path), module="worker_svc") as worker:
        assert await worker.ended() == code
        text = "\n".join(worker.lines)
        assert says in text
        assert "Traceback" not in text


async def test_a_model_that_no_worker_computes_is_refused_before_a_port_is_opened(tmp_path):
    folder = tiny_folder(tmp_path)
    folder.weights.resolve().write_bytes(gguf_content(Shape(architecture="phi3"), parameters(Shape())))
    async with started("--model", str(folder.path), module="worker_svc") as worker:
        assert await worker.ended() == ExitCode.BAD_INPUT
        text = "\n".join(worker.lines)
        assert "tiny.gguf: general.architecture is 'phi3', supported: llama, qwen2, qwen3, gemma3" in text
        assert "listening" not in text


async def test_a_worker_without_plans_rests():
    async with started() as worker:
        await worker.logged("worker loaded")
        client = WorkerClient(worker.ports["listening"])
        await client.attach()
        process = psutil.Process(worker.process.pid)
        await asyncio.sleep(0.5)
        before = process.cpu_times()
        await asyncio.sleep(3)
        after = process.cpu_times()
        await client.close()
        used_s = after.user + after.system - before.user - before.system
        assert used_s <= 0.03, f"{used_s} s of 3 s"
