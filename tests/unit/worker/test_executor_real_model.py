"""SmolLM2 behind the Executor, driven by hand-made plans: known answers, forced and free, and seeded sampling."""

import numpy as np
import pytest

from tests.support.golden import assert_free_run, cases
from tests.support.model import model_folder
from tests.support.plan_driver import PlanDriver, Request
from worker_svc.build import build_tp_model_worker
from worker_svc.runners.executor_settings import ExecutorSettings

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]
CASES = cases("smollm2_greedy.json")
TOLERANCE = 0.002
MATES = 15


@pytest.fixture(scope="module")
def worker():
    settings = ExecutorSettings(numerics="reproducible", num_pages=400, threads=1)
    return build_tp_model_worker(model_folder(), settings)


def free_requests():
    return [Request(prompt_ids=case["prompt_ids"], max_new=len(case["greedy_ids"])) for case in CASES]


@pytest.fixture(scope="module")
def free_ids(worker):
    """All cases at once, whole prompts."""
    return PlanDriver(worker, budget_tokens=2048).run(*free_requests())


def test_forced_ids_as_decode_steps_give_the_known_log_probabilities(worker):
    requests = [
        Request(
            prompt_ids=case["prompt_ids"],
            max_new=len(case["greedy_ids"]),
            forced_ids=case["greedy_ids"],
            top_logprobs=5,
        )
        for case in CASES
    ]
    PlanDriver(worker, budget_tokens=2048).run(*requests)
    steps = []
    for case, request in zip(CASES, requests, strict=True):
        steps += zip(request.top, case["top5_logprobs"], strict=True)
    assert len(steps) == sum(len(case["greedy_ids"]) for case in CASES)
    for found, known in steps:
        np.testing.assert_allclose([value for _, value in found], [value for _, value in known], atol=TOLERANCE)
    # Of ids as well as of ranks; two ids within the tolerance may change places.
    pairs = [(dict(found).get(token_id), value) for found, known in steps for token_id, value in known]
    shared = [(mine, theirs) for mine, theirs in pairs if mine is not None]
    assert len(shared) > 0.98 * len(pairs)
    np.testing.assert_allclose(*zip(*shared, strict=True), atol=TOLERANCE)


def test_free_runs_give_the_known_ids(free_ids):
    for case, token_ids in zip(CASES, free_ids, strict=True):
        assert_free_run(case, token_ids)


def test_chunks_of_sixteen_change_no_id(worker, free_ids):
    assert PlanDriver(worker, budget_tokens=16, page_seed=1).run(*free_requests()) == free_ids


def test_the_canary_changes_no_id_and_finds_nothing(free_ids):
    settings = ExecutorSettings(numerics="reproducible", num_pages=400, threads=1, kv_canary="refuse")
    driver = PlanDriver(build_tp_model_worker(model_folder(), settings), budget_tokens=64, page_seed=4)
    assert driver.run(*free_requests()[:3]) == free_ids[:3]
    assert not any(outcome.canary_hits for result in driver.results for outcome in result.forwards)


def test_free_runs_in_bfloat16_follow_the_known_ids_together_and_in_chunks():
    """Ids whose best is clear: rounding moves log-probabilities by up to 0.1 (D-034), these by far less."""
    chosen = [case | {"greedy_ids": case["greedy_ids"][:8]} for case in (CASES[0], CASES[4], CASES[8])]
    settings = ExecutorSettings(dtype="bfloat16", kernels="torch", num_pages=100, threads=1)
    worker = build_tp_model_worker(model_folder(), settings)
    made = [Request(prompt_ids=case["prompt_ids"], max_new=len(case["greedy_ids"])) for case in chosen]
    for case, token_ids in zip(chosen, PlanDriver(worker, budget_tokens=16).run(*made), strict=True):
        assert_free_run(case, token_ids)


def test_alone_changes_no_id(worker, free_ids):
    for index in (0, 4):
        assert PlanDriver(worker, page_seed=2).run(free_requests()[index]) == [free_ids[index]]


def test_a_seed_gives_the_same_bits_alone_and_among_random_mates(worker):
    def seeded():
        return Request(
            prompt_ids=CASES[1]["prompt_ids"],
            max_new=16,
            temperature=0.9,
            top_k=40,
            top_p=0.95,
            min_p=0.02,
            seed=2**63 + 12345,
            sample_index=1,
            top_logprobs=3,
        )

    draw = np.random.default_rng(8)
    mates = [
        Request(
            prompt_ids=draw.integers(3, 49000, int(draw.integers(2, 70))).tolist(),
            max_new=int(draw.integers(4, 16)),
            temperature=float(draw.choice([0, 0.7, 1.3])),
            top_p=float(draw.choice([1.0, 0.9])),
            top_k=int(draw.choice([0, 20])),
            seed=int(draw.integers(2**63)),
        )
        for _ in range(MATES)
    ]
    alone, among = seeded(), seeded()
    PlanDriver(worker).run(alone)
    PlanDriver(worker, budget_tokens=64, page_seed=3).run(*mates[:7], among, *mates[7:])
    assert among.token_ids == alone.token_ids
    assert (among.logprobs, among.top) == (alone.logprobs, alone.top)
    greedy = Request(prompt_ids=CASES[1]["prompt_ids"], max_new=16)
    assert PlanDriver(worker).run(greedy) != [alone.token_ids]
