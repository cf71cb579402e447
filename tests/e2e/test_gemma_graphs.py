"""Gemma 3 on captured graphs in both of its sub-pools: eager steps beside, and the known ids under the real core."""

import pytest
import torch

from protos.wire.enums import GraphPhase
from protos.wire.plan import GraphChoice
from scheduler_svc.core.events import BucketsChanged
from scheduler_svc.core.settings import CoreSettings
from tests.support.core_harness import make_spec
from tests.support.executor_core import ExecutorCore
from tests.support.forwards import ForwardDriver
from tests.support.golden import assert_free_run, cases
from tests.support.graph_driver import both_phases, capture_all
from tests.support.mixed_graph_steps import BACKENDS, ROOM, assert_replays_equal_eager_steps
from tests.support.model import GEMMA3, model_folder
from worker_svc.build import build_tp_model_worker
from worker_svc.runners.executor_settings import ExecutorSettings

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

CASES = cases("gemma3_greedy.json")
TOKENS = 8


@pytest.fixture(scope="module")
def gemma():
    """The model, and rows in its pools: one longer than its window of 512 tokens."""
    torch.set_num_threads(2)
    driver = ForwardDriver(model_folder(GEMMA3), num_pages=128)
    assert len(driver.pools) == 2
    lengths = [540, 3, 20, 9]
    rows = [
        driver.row([100 + 37 * row + 11 * place % 5000 for place in range(length + ROOM)])
        for row, length in enumerate(lengths)
    ]
    driver.step(rows[:1], lengths[:1])
    driver.step(rows[1:], lengths[1:])
    return driver, rows


@pytest.mark.parametrize("backends", BACKENDS, ids="-".join)
def test_gemma_3_in_both_of_its_sub_pools_replays_what_eager_steps_give(gemma, backends):
    assert_replays_equal_eager_steps(*gemma, backends)


@pytest.fixture(scope="module", params=BACKENDS, ids="-".join)
def worker(request):
    graphs = both_phases(request.param, decode=(2, 8), prefill=(16, 64))
    settings = ExecutorSettings(
        numerics="fast", kernels="torch", num_pages=200, max_rows=16, max_tokens=256, threads=2, graphs=graphs
    )
    worker = build_tp_model_worker(model_folder(GEMMA3), settings)
    capture_all(worker)
    yield worker
    worker.close()


def test_all_cases_replayed_give_the_known_ids(worker):
    core = ExecutorCore(worker, CoreSettings(budget_tokens=32))
    core.step(BucketsChanged(worker="w0", buckets=worker.captures.progress.buckets))
    core.submit(*[make_spec(i, prompt=case["prompt_ids"], max_tokens=TOKENS) for i, case in enumerate(CASES)])
    core.run()
    for index, case in enumerate(CASES):
        assert_free_run({name: case[name][:TOKENS] for name in ("greedy_ids", "top5_logprobs")}, core.output(index))
    chosen_graphs = [forward.graph for _, plan in core.plans for forward in plan.forwards]
    replayed = [graph for graph in chosen_graphs if isinstance(graph, GraphChoice)]
    assert len(replayed) > 0.8 * len(chosen_graphs)
    assert {graph.phase for graph in replayed} == set(GraphPhase)
    core.assert_balanced()
