"""256 real client streams on a simulated device of 5 ms a step: steps a second, the core's loop lag, every token there.

Core and worker share one CPU, edge and client (`forwardplane bench --verify`) another; the shares are printed. Goals:
190 steps a second, loop lag p99 of 10 ms on two cores that nobody else uses.

    python -m pytest -m bench -s tests/bench/test_bench_client_streams.py
"""

import itertools
import json
import statistics
import subprocess
import sys
import time

import psutil
import pytest
from rich.console import Console
from rich.table import Table

from protos.client.serve_command import SimulatedOptions
from protos.client.serve_execution import WorkerOptions
from tests.bench.peers import ROOT
from tests.support.served import Served, scrape, served_for_figures, total

pytestmark = [pytest.mark.bench, pytest.mark.timeout(180)]
STREAMS, STEP_MS, OUTPUT_TOKENS = 256, 5.0, 2000
SECONDS, SETTLE_S, WINDOWS = 22, 8.0, 6
WINDOW_S = 2.0
DEVICE_CPU, CALLERS_CPU = 0, 1
CORE, WORKER = "forwardplane_scheduler_", "forwardplane_worker_"
PARTS = {
    "--role core": "core",
    "--role edge": "edge",
    "worker_svc": "worker",
    "bench": "client",
    "spawn_main": "client",
}


def part_of(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    return next((name for mark, name in PARTS.items() if mark in command), "other")


def pinned(server: Served, client: psutil.Process) -> dict[psutil.Process, str]:
    """Every process by what it is, on its CPU."""
    parts = {process: part_of(process) for process in server.processes()}
    parts |= dict.fromkeys([client, *client.children(recursive=True)], "client")
    for process, name in parts.items():
        cpu = DEVICE_CPU if name in ("core", "worker") else CALLERS_CPU
        for thread in process.threads():
            psutil.Process(thread.id).cpu_affinity([cpu])
    return parts


def quantile_ms(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """Upper bound of the histogram's bucket that holds it."""
    counts = {bound: after[bound] - before[bound] for bound in after}
    wanted = share * counts[float("inf")]
    return min(bound for bound, count in counts.items() if count >= wanted) * 1e3


def look(server: Served, parts: dict[psutil.Process, str]) -> dict[str, object]:
    core, worker = scrape(server.options.ports.metrics_port), scrape(server.options.ports.worker_metrics_port)
    cpu: dict[str, float] = {}
    for process, name in parts.items():
        cpu[name] = cpu.get(name, 0.0) + sum(process.cpu_times()[:2])
    lag = {float(sample.labels["le"]): sample.value for sample in core[f"{CORE}loop_lag_seconds_bucket"]}
    return {
        "at": time.monotonic(),
        "plans": total(core, f"{CORE}plan_encode_seconds_count"),
        "tokens": total(core, f"{CORE}output_tokens_total"),
        "bubble": total(worker, f"{WORKER}bubble_seconds_total"),
        "busy": total(worker, f"{WORKER}busy_seconds_total"),
        "lag": lag,
        "cpu": cpu,
    }


def test_many_streams_of_real_callers(tmp_path):
    path = tmp_path / "figures.json"
    limits, simulated = WorkerOptions(num_pages=70_000), SimulatedOptions(simulated_step_ms=STEP_MS)
    flags = ("--max-rows", "256")
    with served_for_figures(
        device="simulated", numerics="fast", simulated=simulated, limits=limits, worker_flags=flags
    ) as server:
        load = ("--concurrency", str(STREAMS), "--duration-s", str(SECONDS), "--warm-up", "0")
        lengths = ("--prompt-tokens", "64", "--output-tokens", str(OUTPUT_TOKENS), "--verify", "--json", str(path))
        command = [sys.executable, "-m", "protos.client.command", "bench", "--target", server.target, *load, *lengths]
        with psutil.Popen(command, stdout=subprocess.DEVNULL) as client:
            time.sleep(SETTLE_S / 2)
            pinned(server, client)
            time.sleep(SETTLE_S / 2)
            looks = [look(server, pinned(server, client))]
            for _ in range(WINDOWS):
                time.sleep(WINDOW_S)
                looks.append(look(server, pinned(server, client)))
        assert client.returncode == 0, "a token was lost or wrong"
    report(looks, json.loads(path.read_text()))


def report(looks: list[dict], figures: dict) -> None:
    pairs = list(itertools.pairwise(looks))
    rows = {
        "steps/s (goal 190)": [(b["plans"] - a["plans"]) / (b["at"] - a["at"]) for a, b in pairs],
        "tokens/s released by the core": [(b["tokens"] - a["tokens"]) / (b["at"] - a["at"]) for a, b in pairs],
        "loop lag p99, ms (goal 10)": [quantile_ms(a["lag"], b["lag"], 0.99) for a, b in pairs],
        "device idle": [
            (b["bubble"] - a["bubble"]) / (b["bubble"] - a["bubble"] + b["busy"] - a["busy"]) for a, b in pairs
        ],
    }
    for name in looks[0]["cpu"]:
        spent = [b["cpu"][name] - a["cpu"][name] for a, b in pairs]
        rows[f"CPU share: {name}"] = [s / (b["at"] - a["at"]) for s, (a, b) in zip(spent, pairs, strict=True)]
        rows[f"CPU ms a step: {name}"] = [
            1e3 * s / max(b["plans"] - a["plans"], 1) for s, (a, b) in zip(spent, pairs, strict=True)
        ]
    table = Table(f"{STREAMS} streams, {STEP_MS:g} ms a step", "median", "least", "most")
    for name, values in rows.items():
        table.add_row(name, *(f"{value:.2f}" for value in (statistics.median(values), min(values), max(values))))
    Console().print(table, f"client: {figures['throughput']['steady_output_tokens_per_s'] or 0:.0f} tokens/s")
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "bench_client_streams.json").write_text(json.dumps(rows, indent=2))
