"""How many tokens a second one edge process streams: 256 streams, a made-up core that steps every 20 ms or 5 ms.

Core, edge and client are three processes on the same cores; the edge's own processor time is what counts.
"""

import asyncio
import statistics
import subprocess
import sys
import time
from pathlib import Path

import grpc
import psutil
import pytest
from rich.console import Console
from rich.table import Table

from protos.forwardplane.v1 import generate_pb2 as pb
from protos.forwardplane.v1.generate_pb2_grpc import GenerationServiceStub
from protos.forwardplane.v1.sampling_pb2 import StopParameters
from protos.service.channel import caller_channel
from tests.support.tiny_folder import edge_command, tiny_folder

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]
STREAMS = 256
ROOT = Path(__file__).resolve().parents[2]


class Tally:
    def __init__(self) -> None:
        self.tokens = 0
        self.chunks = 0
        self.first_token_s: list[float] = []

    async def stream(self, stub: GenerationServiceStub, num_tokens: int) -> None:
        began = time.monotonic()
        is_first = True
        async for chunk in stub.Generate(pb.GenerateRequest(text="hello", stop=StopParameters(max_tokens=num_tokens))):
            if is_first:
                self.first_token_s.append(time.monotonic() - began)
                is_first = False
            self.tokens += len(chunk.token_ids)
            self.chunks += 1


async def measure(port: int, edge: psutil.Process, num_tokens: int) -> tuple[Tally, float, float]:
    """The tally, and the seconds that passed and that the edge computed."""
    tally = Tally()
    async with caller_channel(f"127.0.0.1:{port}") as channel:
        stub = GenerationServiceStub(channel)
        for _ in range(200):
            try:
                await stub.GetLoad(pb.GetLoadRequest(), timeout=1)
                break
            except grpc.RpcError:
                await asyncio.sleep(0.05)
        await tally.stream(stub, 1)
        computed, began = sum(edge.cpu_times()[:2]), time.monotonic()
        await asyncio.gather(*(tally.stream(stub, num_tokens) for _ in range(STREAMS)))
        return tally, time.monotonic() - began, sum(edge.cpu_times()[:2]) - computed


@pytest.mark.parametrize(("step_ms", "num_tokens"), [(20, 300), (5, 800)])
def test_streams_of_one_edge(tmp_path: Path, free_port, step_ms: int, num_tokens: int) -> None:
    port = free_port()
    folder = tiny_folder(tmp_path / "model", context_tokens=8192)
    core = [sys.executable, "-m", "tests.support.fake_core_process", str(tmp_path / "core.sock"), str(step_ms / 1000)]
    command = edge_command(tmp_path, folder, "--port", str(port), "--edge-metrics-port", "0", "--log-level", "warning")
    with subprocess.Popen(core, cwd=ROOT) as core_process, subprocess.Popen(command, cwd=ROOT) as edge_process:
        try:
            tally, wall_s, edge_s = asyncio.run(measure(port, psutil.Process(edge_process.pid), num_tokens))
        finally:
            edge_process.terminate()
            edge_process.wait()
            core_process.terminate()
    assert tally.tokens == STREAMS * num_tokens + 1
    table = Table("step", "tokens/s", "of the core's", "ids a chunk", "edge cores", "edge µs/token", "first token p50")
    table.add_row(
        f"{step_ms} ms",
        f"{tally.tokens / wall_s:.0f}",
        f"{num_tokens * step_ms / 1000 / wall_s:.0%}",
        f"{tally.tokens / tally.chunks:.1f}",
        f"{edge_s / wall_s:.2f}",
        f"{edge_s / tally.tokens * 1e6:.1f}",
        f"{statistics.median(tally.first_token_s) * 1000:.0f} ms",
    )
    Console().print(table)
