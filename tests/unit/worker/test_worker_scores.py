"""Prompt log-probabilities and hidden states of both stacks on the real model: known answers, equal bits throughout."""

import numpy as np
import pytest

from protos.wire.enums import HiddenMode
from tests.support.golden import cases
from tests.support.model import model_folder
from tests.support.plan_driver import PlanDriver, Request
from worker_svc.build import build_tp_model_worker
from worker_svc.runners.executor_settings import ExecutorSettings

pytestmark = pytest.mark.model

CASES = cases("smollm2_greedy.json")
STACKS = {
    "torch": {"numerics": "reproducible"},
    "native": {"numerics": "fast", "kernels": "native"},
}
# Rounded activations: single log-probabilities may be off by so much.
TOLERANCES = {"torch": 0.002, "native": 0.6}


@pytest.fixture(scope="module", params=STACKS)
def stack(request):
    worker = build_tp_model_worker(
        model_folder(),
        ExecutorSettings(num_pages=300, max_rows=16, max_tokens=1024, threads=1, **STACKS[request.param]),
    )
    yield request.param, worker
    worker.close()


def scoring(case, **changes):
    values = {
        "prompt_ids": [*case["prompt_ids"], *case["greedy_ids"]],
        "max_new": 0,
        "prefill_only": True,
        "score_from": 0,
        "score_top": 5,
        "hidden_mode": HiddenMode.FULL,
    }
    return Request(**{**values, **changes})


def run(worker, requests, **how):
    PlanDriver(worker, **how).run(*requests)
    return requests


def bits(request):
    return request.prompt_logprobs, request.prompt_top, np.stack(request.states).tobytes()


def test_forced_answers_and_equal_bits_in_chunks_and_among_mates(stack):
    name, worker = stack
    whole = run(worker, [scoring(CASES[0])], budget_tokens=1024)[0]
    first = len(CASES[0]["prompt_ids"]) - 1
    compared = 0
    for step, best in enumerate(CASES[0]["top5_logprobs"]):
        found = dict(whole.prompt_top[first + step])
        compared += len(found.keys() & dict(best).keys())
        for token, logprob in best:
            if token in found:
                assert found[token] == pytest.approx(logprob, abs=TOLERANCES[name])
        if name == "torch":
            assert [token for token, _ in whole.prompt_top[first + step]][:1] == [best[0][0]]
    assert compared >= 0.8 * 5 * len(CASES[0]["top5_logprobs"])
    together = run(worker, [scoring(case) for case in CASES[1:4]] + [scoring(CASES[0])], budget_tokens=24, page_seed=3)
    assert bits(together[-1]) == bits(whole)
    assert len(whole.states) == len(whole.prompt_ids)


def test_prompt_and_output_log_probabilities_of_one_token_have_the_same_bits(stack):
    _, worker = stack
    case = CASES[1]
    forced = Request(prompt_ids=case["prompt_ids"], max_new=6, forced_ids=case["greedy_ids"], top_logprobs=20)
    run(worker, [forced])
    scored = run(worker, [scoring(case, score_top=20, prompt_ids=[*case["prompt_ids"], *forced.token_ids])])[0]
    assert scored.prompt_top[len(case["prompt_ids"]) - 1] == forced.top[0]


def test_the_last_state_alone_is_the_last_of_all(stack):
    _, worker = stack
    all_states = run(worker, [scoring(CASES[2])])[0].states
    last = run(worker, [scoring(CASES[2], score_from=None, hidden_mode=HiddenMode.LAST)], budget_tokens=16)[0].states
    assert len(last) == 1
    assert np.array_equal(last[0], all_states[-1])
