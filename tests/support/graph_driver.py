"""A `PlanDriver` whose plans choose buckets as the scheduler does, from what the worker says is live."""

import time
from collections.abc import Callable
from dataclasses import replace

from protos.wire.buckets import choose_bucket
from protos.wire.enums import Feature
from protos.wire.plan import ForwardPlan, GraphChoice
from tests.support.plan_driver import PlanDriver
from worker_svc.runners.graph_settings import GraphSettings
from worker_svc.tp_model_worker import TpModelWorker


def with_graphs(plan: ForwardPlan, worker: TpModelWorker) -> ForwardPlan:
    """`plan` with the bucket of its one forward, or the reason for none."""
    (forward,) = plan.forwards
    graph = choose_bucket(
        worker.captures.progress.buckets,
        mode=forward.mode,
        num_rows=plan.rows.num_rows,
        num_tokens=len(plan.tokens.ids),
    )
    features = set(plan.identity.required_features)
    if isinstance(graph, GraphChoice):
        features.add(int(Feature.GRAPHS))
    identity = replace(plan.identity, required_features=tuple(sorted(features)))
    return replace(plan, identity=identity, forwards=(replace(forward, graph=graph),))


def both_phases(backends: tuple[str, str], *, decode: tuple[int, ...], prefill: tuple[int, ...]) -> GraphSettings:
    """Settings that capture these buckets by the back-ends of decode and of prefill."""
    return GraphSettings(
        graph="all",
        decode_graph_backend=backends[0],
        prefill_graph_backend=backends[1],
        decode_buckets=decode,
        prefill_buckets=prefill,
    )


def graph_driver(worker: TpModelWorker, **options: int) -> PlanDriver:
    driver = PlanDriver(worker, **options)
    driver.change = lambda plan: with_graphs(plan, worker)
    return driver


def capture_all(worker: TpModelWorker, give_way: Callable[[float], None] = lambda _: None) -> None:
    while not worker.captures.progress.is_done:
        if worker.captures.next_ms(is_idle=True) is None:
            time.sleep(0.01)  # something is prepared beside
        else:
            worker.captures.capture_next(give_way, is_idle=True)


def replayed(driver: PlanDriver) -> list[GraphChoice]:
    """The buckets of the forwards so far that were replayed."""
    found = [forward.graph for result in driver.results for forward in result.forwards]
    return [graph for graph in found if isinstance(graph, GraphChoice)]
