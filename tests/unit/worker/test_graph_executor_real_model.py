"""SmolLM2 on captured graphs behind the Executor: the known ids, and the ids of eager runs, on both back-ends."""

import numpy as np
import pytest

from protos.wire.enums import GraphPhase
from tests.support.golden import assert_free_run, cases
from tests.support.graph_driver import capture_all, graph_driver, replayed
from tests.support.model import model_folder
from tests.support.plan_driver import PlanDriver, Request
from worker_svc.build import build_tp_model_worker
from worker_svc.runners.executor_settings import ExecutorSettings
from worker_svc.runners.graph_settings import GraphSettings

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]
CASES = cases("smollm2_greedy.json")
DECODE, PREFILL = (1, 2, 4, 8), (16, 80)


@pytest.fixture(scope="module", params=[("full", "breakable"), ("breakable", "full")], ids="-".join)
def worker(request):
    graphs = GraphSettings(
        graph="all",
        decode_graph_backend=request.param[0],
        prefill_graph_backend=request.param[1],
        decode_buckets=DECODE,
        prefill_buckets=PREFILL,
    )
    worker = build_tp_model_worker(
        model_folder(), ExecutorSettings(numerics="reproducible", num_pages=400, threads=1, graphs=graphs)
    )
    capture_all(worker)
    assert [entry.live for entry in worker.captures.progress.buckets] == [DECODE, PREFILL]
    return worker


def free_requests():
    return [Request(prompt_ids=case["prompt_ids"], max_new=len(case["greedy_ids"])) for case in CASES]


def test_all_cases_replayed_give_the_known_ids(worker):
    driver = graph_driver(worker, budget_tokens=64)
    for case, token_ids in zip(CASES, driver.run(*free_requests()), strict=True):
        assert_free_run(case, token_ids)
    assert len(replayed(driver)) > 0.8 * len(driver.results)
    assert {graph.phase for graph in replayed(driver)} == set(GraphPhase)


def test_every_batch_size_around_a_bucket_gives_the_eager_ids(worker):
    draw = np.random.default_rng(3)
    sizes = [3, 9, 1, 5, 2, 7]
    batches = [[draw.integers(3, 49000, int(draw.integers(2, 6))).tolist() for _ in range(size)] for size in sizes]

    def requests(batch):
        return [Request(prompt_ids=prompt, max_new=2) for prompt in batch]

    used = set()
    for batch in batches:
        driver = graph_driver(worker, budget_tokens=64)
        assert driver.run(*requests(batch)) == PlanDriver(worker, budget_tokens=64).run(*requests(batch))
        used |= {graph.bucket for graph in replayed(driver) if graph.phase is GraphPhase.DECODE}
    assert used == set(DECODE)
