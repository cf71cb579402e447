"""Simulated workers under one scheduler: how much they give together, and which process is full where it saturates.

Everything (client, edge, core, workers) shares this machine's cores; the shares of a core are printed.

    python -m pytest -m bench -s tests/bench/test_bench_simulated_workers.py
"""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from protos.client.fetch_model import fetch_model
from protos.client.serve_command import SimulatedOptions
from protos.client.serve_execution import WorkerOptions
from protos.client.simulated_model import SIMULATED_MODEL
from tests.support import plans
from tests.support.served import served_for_figures
from tests.support.simulated import card
from worker_svc.simulated.build import SimulatedSettings, build_simulated_executor

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]
STEP_MS = 5.0
STREAMS_A_WORKER = 64
SECONDS = 12
SETTLE_S = 5.0
"""Start of the clients, and the first prompts."""
REPEATS = 100


def shares(processes, seconds):
    """Cores used in the next `seconds`, by what a process does."""
    before = {process.pid: sum(process.cpu_times()[:2]) for process in processes}
    time.sleep(seconds)
    used: dict[str, float] = {}
    for process in processes:
        command = " ".join(process.cmdline())
        parts = ("--role core", "--role edge", "worker_svc", "bench", "spawn_main")
        name = next((part for part in parts if part in command), "other")
        spent = sum(process.cpu_times()[:2]) - before[process.pid]
        used[name] = used.get(name, 0.0) + spent / seconds
    return {name: round(value, 2) for name, value in sorted(used.items())}


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_throughput_by_number_of_workers(workers, tmp_path):
    path = tmp_path / "figures.json"
    limits, simulated = WorkerOptions(num_pages=20_000), SimulatedOptions(simulated_step_ms=STEP_MS)
    with served_for_figures(
        device="simulated", numerics="fast", workers=workers, simulated=simulated, limits=limits
    ) as server:
        load = ("--concurrency", str(STREAMS_A_WORKER * workers), "--duration-s", str(SECONDS), "--warm-up", "0")
        lengths = ("--prompt-tokens", "64", "--output-tokens", "256", "--verify", "--json", str(path))
        command = [sys.executable, "-m", "protos.client.command", "bench", "--target", server.target, *load, *lengths]
        with psutil.Popen(command, stdout=subprocess.DEVNULL) as client:
            time.sleep(SETTLE_S)
            used = shares([*server.processes(), client, *client.children(recursive=True)], SECONDS - SETTLE_S)
        assert client.returncode == 0
    figures = json.loads(path.read_text())
    most = workers * STREAMS_A_WORKER / (STEP_MS / 1e3)
    rate = figures["throughput"]["steady_output_tokens_per_s"]
    gap = figures["latencies"]["token_mean_s"]
    print(f"\n{workers} workers of {STREAMS_A_WORKER} streams, {STEP_MS:g} ms a step, {os.cpu_count()} cores for all:")
    print(f"  {rate:.0f} tokens/s, {rate / most:.0%} of what the devices can; ms a token p50 {gap['p50'] * 1e3:.2f}")
    print(f"  cores used: {used}")


@pytest.mark.parametrize("checks_pages", [True, False])
def test_host_work_of_a_step_of_256_rows_of_4k_tokens(checks_pages):
    settings = SimulatedSettings(step_ms=1e-6, num_pages=70_000, max_tokens=1 << 21, checks_pages=checks_pages)
    executor = build_simulated_executor(card(context_tokens=8192), settings)
    info = executor.worker_info()
    executor.execute(plans.make_plan([plans.extend(0, 4095, samples=0) for _ in range(256)], info=info))
    plan = plans.make_plan([plans.decode(4095) for _ in range(256)], info=info)
    begun = time.thread_time()
    for _ in range(REPEATS):
        executor.execute(plan)
    used_ms = (time.thread_time() - begun) / REPEATS * 1e3
    print(
        f"\nsimulated step of 256 rows x 4k, {'every page' if checks_pages else 'last page'}: {used_ms:.2f} ms of CPU"
    )


def test_start_of_a_simulated_worker(tmp_path):
    """Until the log says that it is loaded; the tests check processor time, this is the wall clock."""
    fetch_model(SIMULATED_MODEL, cache=tmp_path)
    seconds = sorted(start_s(tmp_path) for _ in range(5))
    print(f"\nstart of a simulated worker: {seconds[2]:.2f} s (median of 5)")


def start_s(cache):
    flags = ("--device", "simulated", "--model", SIMULATED_MODEL, "--model-cache", str(cache))
    ports = ("--port", "0", "--health-port", "0", "--metrics-port", "0")
    begun = time.monotonic()
    command = [sys.executable, "-m", "worker_svc", *flags, *ports]
    with psutil.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        next(line for line in process.stderr if "worker loaded" in line)
        taken_s = time.monotonic() - begun
        process.terminate()
    return taken_s
