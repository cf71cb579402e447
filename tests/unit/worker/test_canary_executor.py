"""The canary inside the executor: a plan with a wrong page fails that row only, is named and counted."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from protos.wire.enums import Feature, RowFailure
from protos.wire.plan import GraphChoice
from tests.support.graph_driver import capture_all, graph_driver
from tests.support.plan_driver import PlanDriver, Request
from tests.support.tiny_llama import tiny_folder
from worker_svc.build import build_tp_model_worker
from worker_svc.runners.executor_settings import ExecutorSettings
from worker_svc.runners.graph_settings import GraphSettings

SETTINGS = {"numerics": "reproducible", "num_pages": 60, "max_rows": 8, "max_tokens": 128, "threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def workers(folder):
    return {
        mode: build_tp_model_worker(folder, ExecutorSettings(kv_canary=mode, **SETTINGS))
        for mode in ("off", "count", "refuse")
    }


def requests():
    ids = np.random.default_rng(5).integers(0, 250, (3, 40))
    return [Request(prompt_ids=row[:20].tolist(), max_new=12, top_logprobs=1) for row in ids]


def swap_pages(step, swapped=None):
    """In that plan, row 1 lists row 0's first page instead of its own; its first slot goes into `swapped`."""

    def change(plan):
        if plan.identity.seq != step:
            return plan
        table = plan.page_tables[0]
        indices = table.indices.copy()
        indices[table.indptr[1]] = indices[0]
        if swapped is not None:
            swapped.append(int(indices[0]) * 16)
        return replace(plan, page_tables=(replace(table, indices=indices),))

    return change


def test_the_canary_changes_no_bit_of_a_result(workers):
    found = []
    for worker in workers.values():
        mine = requests()
        PlanDriver(worker, budget_tokens=16).run(*mine)
        found.append([(request.token_ids, request.logprobs) for request in mine])
    assert found[0] == found[1] == found[2]
    assert {mode: Feature.CANARY in worker.worker_info().features for mode, worker in workers.items()} == {
        "off": False,
        "count": True,
        "refuse": True,
    }


def test_a_swapped_page_fails_its_row_in_that_step_and_no_other_row(workers, caplog):
    driver, mine, swapped = PlanDriver(workers["refuse"]), requests(), []
    driver.change = swap_pages(4, swapped)
    with caplog.at_level(logging.ERROR, logger="worker_svc.batch.canary_guard"):
        driver.run(*mine)
    assert [request.failure for request in mine] == [None, RowFailure.CANARY, None]
    assert len(mine[1].token_ids) == 3, "three plans were clean"
    clean = requests()
    PlanDriver(workers["off"]).run(*clean)
    assert [mine[index].token_ids for index in (0, 2)] == [clean[index].token_ids for index in (0, 2)]
    assert mine[1].token_ids == clean[1].token_ids[:3]
    (record,) = caplog.records
    assert (record.row, record.handle, record.position) == (1, 2, 0)
    assert [record.slot] == swapped
    assert [sum(outcome.canary_hits for outcome in result.forwards) for result in driver.results[:5]] == [0, 0, 0, 1, 0]


def test_a_swapped_page_is_named_with_row_position_and_slot_in_that_step_under_a_replay(folder, caplog):
    graphs = GraphSettings(graph="decode", decode_buckets=(4,))
    worker = build_tp_model_worker(folder, ExecutorSettings(kv_canary="refuse", graphs=graphs, **SETTINGS))
    capture_all(worker)
    driver, mine, swapped = graph_driver(worker), requests(), []
    with_bucket, swap = driver.change, swap_pages(4, swapped)
    driver.change = lambda plan: with_bucket(swap(plan))
    with caplog.at_level(logging.ERROR, logger="worker_svc.batch.canary_guard"):
        driver.run(*mine)
    (forward,) = driver.results[3].forwards
    assert (forward.canary_hits, isinstance(forward.graph, GraphChoice)) == (1, True)
    assert [request.failure for request in mine] == [None, RowFailure.CANARY, None]
    (record,) = caplog.records
    assert (record.row, record.handle, record.position, record.slot) == (1, 2, 0, *swapped)


def test_a_counting_canary_lets_the_row_go_on(workers):
    driver, mine = PlanDriver(workers["count"]), requests()
    driver.change = swap_pages(4)
    driver.run(*mine)
    assert [request.failure for request in mine] == [None, None, None]
    hits = [sum(outcome.canary_hits for outcome in result.forwards) for result in driver.results]
    assert hits == [0, 0, 0, 1, *[0] * (len(hits) - 4)]


def test_the_shadow_counts_as_pool_memory(folder):
    settings = {**SETTINGS, "num_pages": None, "kv_bytes": 1_000_000}
    without, within = (
        build_tp_model_worker(folder, ExecutorSettings(kv_canary=mode, **settings)).worker_info().sub_pools[0]
        for mode in ("off", "refuse")
    )
    assert within.num_pages == 1_000_000 // (without.bytes_per_page + 16 * 16 + 32)
    assert within.num_pages < without.num_pages
