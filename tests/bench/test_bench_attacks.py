"""What attacks on a callers' port cost a well-behaved client: p99 of small streams beside one attacker, and beside a
process that burns as much of a processor as the attacker did. Goal: 1.5 times. Rounds of both take turns.

    python -m pytest -m bench -s tests/bench/test_bench_attacks.py
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from protos.client.generation_client import GenerationClient
from protos.client.messages import GenerateOptions
from tests.support.attacked_edge import Edge, attacked_edge
from tests.support.grpc_attacks import ATTACKS

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1200)]
ROUNDS, ROUND_S, GOAL = 4, 2.0, 1.5
OPTIONS = GenerateOptions(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def edge(tmp_path_factory) -> Iterator[Edge]:
    with attacked_edge(tmp_path_factory.mktemp("attacked"), log_level="error") as edge:
        yield edge


@contextlib.contextmanager
def beside(*command: str) -> Iterator[psutil.Process]:
    """A process that runs until its standard input closes."""
    running = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE)
    try:
        time.sleep(1.0)
        yield psutil.Process(running.pid)
    finally:
        assert running.stdin is not None
        running.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(5)
        running.kill()
        running.wait()


def used_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def latencies(client: GenerationClient) -> list[float]:
    found, end = [], time.monotonic() + ROUND_S
    while time.monotonic() < end:
        begun = time.monotonic()
        assert sum(len(chunk.token_ids) for chunk in client.stream("abc", OPTIONS)) == 4
        found.append(time.monotonic() - begun)
    return found


@pytest.mark.parametrize("name", ATTACKS)
def test_a_well_behaved_client_beside_an_attacker(edge, name):
    attacked: list[float] = []
    burnt: list[float] = []
    shares: list[float] = []
    burner = str(Path(__file__).parent / "cpu_burner.py")
    with GenerationClient(edge.target, timeout_s=30) as client:
        latencies(client)
        for _ in range(ROUNDS):
            with beside("-m", "tests.support.grpc_attacks", name, str(edge.port)) as attacker:
                before, begun = used_s(attacker), time.monotonic()
                attacked += latencies(client)
                shares.append((used_s(attacker) - before) / (time.monotonic() - begun))
            with beside(burner, f"{max(0.01, shares[-1]):.3f}"):
                burnt += latencies(client)
    ours, theirs = (np.percentile(found, [50, 99]) * 1e3 for found in (attacked, burnt))
    print(f"{name}: attacker uses {np.mean(shares):.2f} of a core; p50 {ours[0]:.1f} / {theirs[0]:.1f} ms, ", end="")
    print(f"p99 {ours[1]:.1f} / {theirs[1]:.1f} ms: {ours[1] / theirs[1]:.2f} times (goal {GOAL})", end="")
    print(f", {len(attacked)} and {len(burnt)} streams")
