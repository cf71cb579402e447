"""A hardened edge process under attack, over a made-up core, and what it held before the attacks."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil

from protos.client.generation_client import GenerationClient
from protos.client.messages import GenerateOptions
from protos.wire.errors import EngineError
from tests.support.grpc_attacks import channel
from tests.support.served import free_ports, scrape, total
from tests.support.tiny_folder import edge_command, tiny_folder


@dataclass
class Edge:
    port: int
    metrics_port: int
    process: psutil.Process
    rss: int
    descriptors: int

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def closed_connections(self) -> int:
        """Since they wasted their calls."""
        return int(total(scrape(self.metrics_port), "forwardplane_scheduler_closed_connections_total"))

    def channel(self, **options: object) -> grpc.Channel:
        return channel(self.port, **options)


@contextlib.contextmanager
def attacked_edge(folder: Path, *, log_level: str) -> Iterator[Edge]:
    """An edge that has answered; at the end it must still run, and stop in order."""
    model = tiny_folder(folder / "model")
    port, metrics_port = free_ports(2)
    core = subprocess.Popen([sys.executable, "-m", "tests.support.fake_core_process", folder / "core.sock", "0.001"])
    while not (folder / "core.sock").exists():
        time.sleep(0.01)
    flags = ("--port", str(port), "--edge-metrics-port", str(metrics_port), "--log-level", log_level, "--hardened")
    process = subprocess.Popen(edge_command(folder, model, *flags))
    try:
        with GenerationClient(f"127.0.0.1:{port}") as client:
            wait_for(lambda: client.generate(["abc"], GenerateOptions(max_tokens=2)))
            client.generate(["abc"] * 8, GenerateOptions(max_tokens=2))
        seen = psutil.Process(process.pid)
        yield Edge(port, metrics_port, seen, seen.memory_info().rss, seen.num_fds())
        assert process.poll() is None
    finally:
        process.terminate()
        assert process.wait(30) == 0
        core.kill()
        core.wait()


def wait_for(call: Callable[[], object]) -> None:
    """Until it raises nothing, at most 30 seconds; then what it raises."""
    end = time.monotonic() + 30
    while True:
        try:
            call()
        except (EngineError, AssertionError):
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
        else:
            return
