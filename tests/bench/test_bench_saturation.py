"""One, two and four simulated workers under one core: where it saturates, and what takes its time there.

The core has a CPU for itself; workers and the stand-in of an edge share another, so beyond its share they may be what
is full: both are printed. The profile is of the whole core with four workers, by cProfile, which slows it down.

    python -m pytest -m bench -s tests/bench/test_bench_saturation.py
"""

import asyncio
import json
import pstats
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.bench.core_and_worker import Scene, Window, running, window
from tests.bench.peers import ROOT

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]
STEP_MS, ROWS, CONTEXT = 5.0, 64, 1024
SETTLE_S, SECONDS, SHOWN = 1.5, 5.0, 14
WORKERS = (1, 2, 4)


async def measured(scene: Scene, folder: Path) -> Window:
    async with running(scene, folder) as system:
        await system.fill(max_tokens=4000)
        await asyncio.sleep(SETTLE_S)
        begin = system.look()
        await asyncio.sleep(SECONDS)
        return window(begin, system.look())


def test_where_one_core_saturates(tmp_path):
    table = Table("workers", "steps/s", "of the devices'", "idle", "core, CPUs", "core ms/step", "workers, CPUs")
    figures = {}
    for count in WORKERS:
        scene = Scene(step_ms=STEP_MS, rows=ROWS, context=CONTEXT, workers=count)
        folder = tmp_path / str(count)
        folder.mkdir()
        run = asyncio.run(measured(scene, folder))
        figures[count] = {
            "steps_per_s": run.steps_per_s,
            "of_the_devices": run.steps_per_s / (count * 1e3 / STEP_MS),
            "idle": run.idle_share,
            "core_cpus": run.core_cpus,
            "core_ms_a_step": run.core_s_per_step * 1e3,
            "worker_cpus": run.worker_cpus,
        }
        shown = figures[count]
        table.add_row(
            str(count),
            f"{shown['steps_per_s']:.0f}",
            f"{shown['of_the_devices']:.0%}",
            f"{shown['idle']:.1%}",
            f"{shown['core_cpus']:.2f}",
            f"{shown['core_ms_a_step']:.2f}",
            f"{shown['worker_cpus']:.2f}",
        )
    most = figures[WORKERS[-1]]
    alone = 1 / (most["core_ms_a_step"] / 1e3) / (1e3 / STEP_MS)
    Console().print(
        table, f"a core with a CPU for itself is full at {alone:.1f} such workers ({ROWS} rows, {STEP_MS:g} ms)"
    )
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "bench_saturation.json").write_text(json.dumps(figures, indent=2))


def test_what_takes_the_time_of_a_core_with_four_workers(tmp_path):
    profile = tmp_path / "core.prof"
    scene = Scene(step_ms=STEP_MS, rows=ROWS, context=CONTEXT, workers=4)
    asyncio.run(measured(replace(scene, profile=profile), tmp_path))
    stats = pstats.Stats(str(profile))
    table = Table("function", "calls", "own s", "with callees s")
    rows = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:SHOWN]
    for (file, line, name), (_, calls, own, whole, _) in rows:
        place = file.removeprefix(f"{ROOT}/") if line else ""
        table.add_row(f"{place}:{name}" if place else name, str(calls), f"{own:.2f}", f"{whole:.2f}")
    Console().print(table)
