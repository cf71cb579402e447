"""Replayed and eager plans side by side on one worker, for figures: medians of one run, in turns."""

import statistics
import time
from dataclasses import dataclass

from protos.service.model_files import ModelFolder
from protos.wire.enums import GraphPhase
from tests.support.graph_driver import capture_all, graph_driver, replayed
from tests.support.plan_driver import PlanDriver, Request
from worker_svc.build import build_tp_model_worker
from worker_svc.runners.executor_settings import ExecutorSettings
from worker_svc.runners.graph_settings import GraphSettings
from worker_svc.tp_model_worker import TpModelWorker


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Of one prompt, alone in its plan."""

    backend: str
    ran: str
    """The back-end in its place, where attention cannot lie inside a graph."""
    tokens: int
    eager_ms: float
    replay_ms: float
    capture_s: float
    graph_bytes: int


def prefill_worker(folder: ModelFolder, settings: ExecutorSettings, *, backend: str, tokens: int) -> TpModelWorker:
    """A worker with the one prefill graph of `tokens`, captured."""
    graphs = GraphSettings(graph="prefill", prefill_graph_backend=backend, prefill_buckets=(tokens,))
    changed = {name: getattr(settings, name) for name in ("device", "dtype", "numerics", "num_pages", "threads")}
    worker = build_tp_model_worker(folder, ExecutorSettings(**changed, kernels="torch", graphs=graphs))
    capture_all(worker)
    assert worker.captures.progress.buckets[0].live == (tokens,), "the bucket could not be captured"
    return worker


def prefill_figure(worker: TpModelWorker, *, backend: str, tokens: int, rounds: int) -> Figure:
    """Median times of plans with one prompt of `tokens`, replayed and eager in turns; both give the same token."""
    times: dict[str, list[float]] = {"eager": [], "replay": []}
    for number in range(rounds + 2):
        prompt = [7 + (number + place) % 200 for place in range(tokens)]
        given = []
        for name, driver in (("eager", PlanDriver(worker)), ("replay", graph_driver(worker))):
            begin = time.perf_counter()
            given.append(driver.run(Request(prompt_ids=prompt, max_new=1)))
            times[name].append(1e3 * (time.perf_counter() - begin))
            assert len(replayed(driver)) == (name == "replay")
        assert given[0] == given[1] or worker.worker_info().device != "cpu"
    totals = worker.captures.progress.totals[GraphPhase.PREFILL]
    return Figure(
        backend=backend,
        ran=worker.captures.runners[0].backend_name,
        tokens=tokens,
        eager_ms=statistics.median(times["eager"][2:]),
        replay_ms=statistics.median(times["replay"][2:]),
        capture_s=totals.seconds,
        graph_bytes=totals.graph_bytes,
    )


def figures_table(figures: list[Figure], *, goals: dict[str, float]) -> str:
    """Text. A back-end that this device replaces by another is named with what ran in its place."""
    numbers = f"{'eager ms':>10}{'replay ms':>11}{'speed-up':>10}{'goal':>7}{'capture s':>11}{'MB':>8}"
    lines = [f"{'back-end':24}{'tokens':>8}{numbers}"]
    for found in figures:
        name = found.backend if found.ran == found.backend else f"{found.backend} (ran {found.ran})"
        goal = f"{goals[found.backend]:.2f}" if found.backend in goals else ""
        lines.append(
            f"{name:24}{found.tokens:8}{found.eager_ms:10.2f}{found.replay_ms:11.2f}"
            f"{found.eager_ms / found.replay_ms:10.2f}{goal:>7}{found.capture_s:11.2f}{found.graph_bytes / 1e6:8.1f}"
        )
    return "\n".join(lines)
