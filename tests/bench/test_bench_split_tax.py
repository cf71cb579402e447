"""What the split costs: core and executor over gRPC, two plans and one in flight, beside both in one process.

SmolLM2 on the native kernels with one thread each, 32-token prompts, 64 new tokens, end-of-sequence ignored, prefill
included, no edge and no client on any side. Interleaved rounds with new prompts each (no prefix is cached); medians and
their ratios. All sides share the machine's cores; only one works at a time.
"""

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from scheduler_svc.core.events import RequestSpec
from scheduler_svc.links.fingerprints import ExpectedModel
from tests.bench.peers import ROOT
from tests.bench.split_tax import OneProcess, OverGrpc
from tests.support.core_harness import make_spec
from tests.support.model import model_folder
from tests.support.served import free_ports
from worker_svc.build import build_tp_model_worker
from worker_svc.runners.executor_settings import ExecutorSettings

pytestmark = [pytest.mark.bench, pytest.mark.model, pytest.mark.timeout(3600)]
PROMPT_TOKENS, NEW_TOKENS, ROUNDS, NUM_PAGES, THREADS = 32, 64, 5, 800, 1
ONE, WINDOW_1, WINDOW_2 = "one process", "gRPC, window 1", "gRPC, window 2"


@contextlib.contextmanager
def worker(window: int) -> Iterator[str]:
    """A worker process; its address."""
    port, health, metrics = free_ports(3)
    flags = {
        "model": model_folder().path,
        "port": port,
        "health-port": health,
        "metrics-port": metrics,
        "window": window,
        "threads": THREADS,
        "num-pages": NUM_PAGES,
        "log-level": "warning",
    }
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    process = subprocess.Popen([sys.executable, "-m", "worker_svc", *arguments], cwd=ROOT)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        assert process.wait(30) == 0


class Prompts:
    def __init__(self) -> None:
        self._draw = np.random.default_rng(11)
        self._streams = 0

    def specs(self, count: int) -> list[RequestSpec]:
        self._streams += count
        ids = self._draw.integers(100, 40000, (count, PROMPT_TOKENS))
        return [
            make_spec(
                self._streams + index, prompt=prompt.tolist(), max_tokens=NEW_TOKENS, deadline_s=time.monotonic() + 600
            )
            for index, prompt in enumerate(ids)
        ]


@pytest.mark.parametrize("concurrent", [16, 64])
def test_split_tax(concurrent):
    folder = model_folder()
    settings = ExecutorSettings(numerics="fast", num_pages=NUM_PAGES, threads=THREADS)
    executor = build_tp_model_worker(folder, settings)
    info = executor.worker_info()
    one = OneProcess(executor, replace(info, limits=replace(info.limits, window=1)))
    expected = ExpectedModel(name=folder.card.name, tokenizer_fingerprint=folder.card.tokenizer_fingerprint)
    with worker(1) as first, worker(2) as second:
        rates = asyncio.run(_rounds(one, {WINDOW_1: first, WINDOW_2: second}, expected, concurrent))
    executor.close()
    _report(rates, concurrent)


async def _rounds(one, addresses, expected, concurrent) -> dict[str, list[float]]:
    prompts = Prompts()
    rates: dict[str, list[float]] = {name: [] for name in (ONE, *addresses)}
    async with contextlib.AsyncExitStack() as stack:
        sides = {
            name: await stack.enter_async_context(OverGrpc(address, expected)) for name, address in addresses.items()
        }
        for round_number in range(ROUNDS + 1):
            for name in rates:
                specs = prompts.specs(concurrent)
                seconds = one.run(specs) if name == ONE else await sides[name].run(specs)
                rates[name] += [concurrent * NEW_TOKENS / seconds] * (round_number > 0)  # the first warms up
    return rates


def _report(rates: dict[str, list[float]], concurrent: int) -> None:
    medians = {name: statistics.median(values) for name, values in rates.items()}
    table = Table(f"{concurrent} concurrent", "tokens/s, median", "rounds")
    for name, values in rates.items():
        table.add_row(name, f"{medians[name]:.1f}", " ".join(f"{value:.1f}" for value in values))
    console = Console()
    console.print(table)
    ratios = {
        "window 2 / one process": medians[WINDOW_2] / medians[ONE],
        "window 2 / window 1": medians[WINDOW_2] / medians[WINDOW_1],
    }
    console.print(", ".join(f"{name} = {ratio:.3f}" for name, ratio in ratios.items()))
    (ROOT / "build").mkdir(exist_ok=True)
    path = ROOT / "build" / f"bench_split_tax_{concurrent}.json"
    path.write_text(json.dumps({"rates": rates, "ratios": ratios}, indent=2))
