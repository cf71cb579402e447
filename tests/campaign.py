"""Suites that run as long as they are given: `python -m tests.campaign --budget 12m`. Says what each of them reached.

Simulation gets nine twentieths of the time, fault cycles on real processes a quarter, guards that are switched off,
soak and fuzzing a tenth each.
"""

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path

from protos.client.fetch_model import fetch_model
from protos.client.serve_command import SimulatedOptions
from protos.client.simulated_model import SIMULATED_MODEL
from tests.fuzz.__main__ import fuzz_borders
from tests.fuzz.targets import TARGETS
from tests.simulation.__main__ import seconds
from tests.simulation.campaign import CampaignReport, run_until
from tests.simulation.mutants import MUTANTS, switch_off
from tests.support.fault_cycles import STRIKES, CycleReport, FaultCycles
from tests.support.net_spaces import NoNetSpaces
from tests.support.served import served_for_figures
from tests.support.small_disk import NoSmallDisk
from tests.support.soak import soak
from tests.support.struck_group import struck_group

SIMULATION_SHARE, CYCLES_SHARE, GUARDS_SHARE, SOAK_SHARE, FUZZ_SHARE = 0.45, 0.25, 0.1, 0.1, 0.1
MOST_SEEDS = 60
WORKERS = 3
SOAK_REQUESTS = 10_000


def simulate(budget_s: float, first_seed: int) -> bool:
    """Whether every invariant held."""
    report = CampaignReport(Counter(), [], 0)
    spent_s = run_until(report, budget_s=budget_s, first=first_seed)
    print(report.text(spent_s), flush=True)
    return not report.broken


def strike_processes(budget_s: float, first_seed: int) -> bool:
    """Whether every stream got its tokens. Each round has processes of its own."""
    whole = CycleReport()
    begun, seed = time.monotonic(), first_seed
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        fetch_model(SIMULATED_MODEL, cache=cache)
        while time.monotonic() - begun < budget_s or not whole.requests:
            whole.add(_round(cache, seed))
            seed += 1
    print(whole.text(), *whole.wrong, sep="\n", flush=True)
    return not whole.wrong


def soak_processes(budget_s: float) -> bool:
    """Whether nothing grew and no worker was given up."""
    with tempfile.TemporaryDirectory() as folder:
        fetch_model(SIMULATED_MODEL, cache=Path(folder))
        steps = SimulatedOptions(simulated_step_ms=1.0)
        choices = {"device": "simulated", "model_cache": Path(folder), "simulated": steps, "numerics": "fast"}
        with served_for_figures(**choices) as server:
            report = asyncio.run(soak(server, most_requests=SOAK_REQUESTS, until=time.monotonic() + budget_s))
    print(report.text(), *report.wrong(), sep="\n", flush=True)
    return not report.wrong()


def _round(cache: Path, seed: int) -> CycleReport:
    """Every kind of fault once, on a group for each way between processes: each way hides what another shows."""
    report = CycleReport()
    for ways, strikes in STRIKES.items():
        try:
            with struck_group(workers=WORKERS, cache=cache, ways=ways) as group:
                report.add(asyncio.run(FaultCycles(group, seed=seed).run(list(strikes))))
        except (NoNetSpaces, NoSmallDisk) as error:
            print(f"left out, {', '.join(strikes)}: {error}", flush=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulation, faults, soak and fuzzing for as long as they are given.")
    parser.add_argument("--budget", type=seconds, default=720.0, help="90s, 12m, 2h")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    arguments = parser.parse_args()
    print("== simulation", flush=True)
    holds = simulate(SIMULATION_SHARE * arguments.budget, arguments.first)
    print("== fault cycles on real processes", flush=True)
    holds &= strike_processes(CYCLES_SHARE * arguments.budget, arguments.first)
    print("== soak", flush=True)
    holds &= soak_processes(SOAK_SHARE * arguments.budget)
    print("== guards switched off", flush=True)
    until = time.monotonic() + GUARDS_SHARE * arguments.budget
    holds &= switch_off(MUTANTS, seeds=MOST_SEEDS, until=until)
    print("== fuzzing", flush=True)
    holds &= fuzz_borders(list(TARGETS), FUZZ_SHARE * arguments.budget, seed=arguments.first)
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
