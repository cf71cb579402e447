"""The edge as the process that the parent starts, with a made-up core on the other end of the bridge."""

import asyncio
import contextlib
import json
import signal
import socket
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import psutil
import pytest

from protos.forwardplane.v1 import generate_pb2 as pb
from protos.forwardplane.v1.generate_pb2_grpc import GenerationServiceStub
from protos.forwardplane.v1.sampling_pb2 import StopParameters
from protos.service.channel import caller_channel
from tests.support.fake_core import FakeCore
from tests.support.tiny_folder import edge_command, tiny_folder


@contextlib.asynccontextmanager
async def edge_process(folder: Path, model: Path, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    command = edge_command(folder, model, "--log-format", "json", *flags)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def log_lines(process: asyncio.subprocess.Process, until: str) -> list[dict]:
    """Lines of the log up to the one with that message."""
    lines: list[dict] = []
    assert process.stderr is not None
    async with asyncio.timeout(30):
        while not lines or lines[-1]["event"] != until:
            line = await process.stderr.readline()
            assert line, f"the log ended without {until!r}: {lines}"
            lines.append(json.loads(line))
    return lines


async def test_serves_idles_and_stops_in_order(tmp_path: Path, free_port) -> None:
    core = FakeCore(tmp_path / "core.sock", step_s=0.02)
    await core.start()
    model = tiny_folder(tmp_path / "model")
    metrics_port = free_port()
    flags = ("--port", "0", "--http-port", "0", "--edge-metrics-port", str(metrics_port))
    async with edge_process(tmp_path, model, *flags) as process:
        lines = await log_lines(process, "edge listens")
        port = lines[-1]["port"]
        http_port = next(line["port"] for line in lines if line["event"] == "HTTP front listens")
        async with caller_channel(f"127.0.0.1:{port}") as channel:
            stub = GenerationServiceStub(channel)
            chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="a secret")])
            request = pb.GenerateRequest(chat=chat, stop=StopParameters(max_tokens=5))
            reply = await stub.GenerateOnce(pb.GenerateOnceRequest(requests=[request]))
            assert reply.generations[0].usage.output_tokens == 5
            page = await asyncio.to_thread(_get, f"http://127.0.0.1:{metrics_port}/metrics")
            assert 'forwardplane_scheduler_requests_total{code="OK",method="GenerateOnce"} 1.0' in page

            asked = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 3}
            answer = await asyncio.to_thread(_post, f"http://127.0.0.1:{http_port}/v1/chat/completions", asked)
            assert answer["usage"]["completion_tokens"] == 3

            busy = psutil.Process(process.pid)
            family = [busy, *busy.children(recursive=True)]
            spent = []
            for _ in range(3):
                before = _cpu_s(family)
                await asyncio.sleep(1)
                spent.append(_cpu_s(family) - before)
            assert min(spent) < 0.025

            call = stub.Generate(pb.GenerateRequest(text="abc", stop=StopParameters(max_tokens=20)))
            await call.read()
            asked = {"prompt": "abc", "max_tokens": 20, "stream": True}
            streaming = asyncio.create_task(
                asyncio.to_thread(_events, f"http://127.0.0.1:{http_port}/v1/completions", asked)
            )
            while len(core.streams) < 2:
                await asyncio.sleep(0.005)
            process.send_signal(signal.SIGTERM)
            chunks = [chunk async for chunk in _rest(call)]
            assert chunks[-1].usage.output_tokens == 20
            events = await streaming
            assert events[-1] == "data: [DONE]"
            assert '"finish_reason":"length"' in events[-2]
        assert await process.wait() == 0
        lines = [json.loads(line) for line in (await process.stderr.read()).splitlines()]
        finished = [line for line in lines if line["event"] == "request finished"]
        assert [line["output_tokens"] for line in finished][-1] == 20
        assert "secret" not in json.dumps(lines)
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in family[1:])
    await core.stop()


async def test_ends_when_the_core_is_gone(tmp_path: Path) -> None:
    core = FakeCore(tmp_path / "core.sock")
    await core.start()
    async with edge_process(
        tmp_path, tiny_folder(tmp_path / "model"), "--port", "0", "--edge-metrics-port", "0"
    ) as process:
        await log_lines(process, "edge listens")
        core.hang_up()
        async with asyncio.timeout(30):
            assert await process.wait() == 1
    await core.stop()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda model: (model / "tokenizer.json").write_text("{}"), "not the file that model.json describes"),
        (lambda model: (model / "chat_template.jinja").write_text("{% for %}"), "does not compile"),
        (lambda model: (model / "chat_template.jinja").write_bytes(b"\xff\xfe"), "cannot be read as text"),
        (lambda model: (model / "tokenizer.json").unlink(), "has no tokenizer.json"),
    ],
)
async def test_a_model_that_cannot_be_served_ends_it_with_a_reason(tmp_path: Path, spoil, reason: str) -> None:
    model = tiny_folder(tmp_path / "model")
    spoil(model)
    async with edge_process(tmp_path, model, "--port", "0", "--edge-metrics-port", "0") as process:
        _, log = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 65
        assert reason in log.decode()


@pytest.mark.parametrize("flag", ["--port", "--http-port"])
async def test_a_port_in_use_says_so(tmp_path: Path, flag: str) -> None:
    core = FakeCore(tmp_path / "core.sock")
    await core.start()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        model = tiny_folder(tmp_path / "model")
        ports = {"--port": "0", "--edge-metrics-port": "0", flag: port}
        flags = [part for pair in ports.items() for part in pair]
        async with edge_process(tmp_path, model, *flags) as process:
            _, log = await asyncio.wait_for(process.communicate(), 30)
            assert process.returncode == 69
            assert f"port {port} is in use" in log.decode()
    await core.stop()


async def _rest(call) -> AsyncIterator[pb.GenerateChunk]:
    while (chunk := await call.read()) is not grpc.aio.EOF:
        yield chunk


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as reply:
        return reply.read().decode()


def _post(url: str, asked: dict) -> dict:
    with urllib.request.urlopen(_json_request(url, asked), timeout=30) as reply:
        return json.loads(reply.read())


def _events(url: str, asked: dict) -> list[str]:
    with urllib.request.urlopen(_json_request(url, asked), timeout=30) as reply:
        return reply.read().decode().strip().split("\n\n")


def _json_request(url: str, asked: dict) -> urllib.request.Request:
    return urllib.request.Request(url, json.dumps(asked).encode(), {"Content-Type": "application/json"})


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)
