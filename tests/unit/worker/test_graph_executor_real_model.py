"""SmolLM2 on captured graphs behind the Executor: the known ids, and the ids of eager runs, on both back-ends."""

import numpy as np
import pytest

from protos.wire.enums import GraphPhase
from tests.support.golden import assert_free_run, cases
from tests.support.graph_bench import GraphBench
from tests.support.graph_driver import both_phases, capture_all, graph_driver, replayed
from tests.support.mixed_graph_steps import BACKENDS
from tests.support.model import model_folder
from tests.support.plan_driver import PlanDriver, Request
from worker_svc.build import build_tp_model_worker
from worker_svc.device.tape_arena import TapeArena
from worker_svc.runners.executor_settings import ExecutorSettings

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]
CASES = cases("smollm2_greedy.json")
DECODE, PREFILL = (1, 2, 4, 8), (16, 80)


@pytest.fixture(scope="module", params=BACKENDS, ids="-".join)
def worker(request):
    graphs = both_phases(request.param, decode=DECODE, prefill=PREFILL)
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


def test_every_prompt_length_around_a_bucket_gives_the_eager_ids(worker):
    draw = np.random.default_rng(5)
    prompts = [draw.integers(3, 49000, length).tolist() for length in (15, 16, 17, 79, 80, 81)]
    used = []
    for prompt in prompts:
        driver = graph_driver(worker)
        alone = Request(prompt_ids=prompt, max_new=2)
        assert driver.run(alone) == PlanDriver(worker).run(Request(prompt_ids=prompt, max_new=2))
        used.append([graph.bucket for graph in replayed(driver) if graph.phase is GraphPhase.PREFILL])
    assert used == [[16], [16], [], [80], [80], []], "17 is below half of 80, 81 above it"


def test_the_pool_of_all_buckets_of_both_phases_is_below_1_3_of_the_largest_alone():
    bench = GraphBench(model_folder(), decode=(1, 4, 16), prefill=(16, 64), numerics="fast")

    def pool_of(*shapes):
        bench.device.arena = TapeArena()
        for runner, size in shapes:
            bench.capture_one(runner, size)
        return bench.device.pool_bytes()

    largest = max(pool_of((bench.prefill, 64)), pool_of((bench.decode, 16)))
    everything = [(bench.prefill, size) for size in (64, 16)] + [(bench.decode, size) for size in (16, 4, 1)]
    assert largest < pool_of(*everything) + 1 < 1.3 * largest
