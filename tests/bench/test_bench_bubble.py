"""How long a device waits for the scheduler: a core process over gRPC to a simulated worker, two plans in flight.

The core has one CPU for itself, worker and the stand-in of an edge share another. Idle is the worker's own account:
time between plans while rows are running, over that and the time of plans. Steady decode; medians and tails of windows.

    python -m pytest -m bench -s tests/bench/test_bench_bubble.py
"""

import asyncio
import itertools
import json
import statistics

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from tests.bench.core_and_worker import Scene, Window, running, window
from tests.bench.peers import ROOT

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]
RUNS, RUN_S, SETTLE_S = 7, 2.0, 1.0
GOALS = {(5.0, 256, 4096): 0.02, (2.0, 64, 4096): 0.05}


async def measured(scene: Scene, folder) -> tuple[list[Window], list[float]]:
    """The windows, and milliseconds between messages to the edge."""
    async with running(scene, folder) as system:
        await system.fill(max_tokens=int((RUNS * RUN_S + 60) / scene.step_ms * 1e3))
        await asyncio.sleep(SETTLE_S)
        system.edge.arrivals.clear()
        looks = [system.look()]
        for _ in range(RUNS):
            await asyncio.sleep(RUN_S)
            looks.append(system.look())
        assert not system.edge.errors
        gaps = np.diff(system.edge.arrivals) * 1e3
        return [window(*pair) for pair in itertools.pairwise(looks)], gaps.tolist()


@pytest.mark.parametrize(("step_ms", "rows", "context"), GOALS)
def test_idle_share_of_the_device(step_ms, rows, context, tmp_path):
    scene = Scene(step_ms=step_ms, rows=rows, context=context)
    windows, gaps = asyncio.run(measured(scene, tmp_path))
    idle = sorted(each.idle_share for each in windows)
    table = Table(f"{step_ms:g} ms, {rows} rows x {context}", "median", "best", "worst", "goal", title=f"{RUNS} runs")
    goal = GOALS[step_ms, rows, context]
    table.add_row("device idle", *(f"{share:.2%}" for share in (statistics.median(idle), idle[0], idle[-1], goal)))
    for name, found, shown in (
        ("steps_per_s", [each.steps_per_s for each in windows], f"{1e3 / step_ms:.0f}"),
        ("core_us_per_row", [each.core_s_per_step / rows * 1e6 for each in windows], ""),
        ("core_share", [each.core_cpus for each in windows], ""),
        ("worker_share", [each.worker_cpus for each in windows], ""),
    ):
        values = sorted(found)
        table.add_row(name, *(f"{value:.2f}" for value in (statistics.median(values), values[0], values[-1])), shown)
    percentiles = np.percentile(gaps, (50, 99, 99.9)).tolist()
    table.add_row("ms between steps at the edge", f"{percentiles[0]:.2f}", "", f"{max(gaps):.1f}", "")
    Console().print(table, f"p99 {percentiles[1]:.2f} ms, p99.9 {percentiles[2]:.2f} ms between steps")
    (ROOT / "build").mkdir(exist_ok=True)
    path = ROOT / "build" / f"bench_bubble_{step_ms:g}ms_{rows}.json"
    path.write_text(json.dumps({"idle": idle, "gaps_ms": percentiles, "goal": goal}, indent=2))
