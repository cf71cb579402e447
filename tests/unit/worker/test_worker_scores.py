"""Prompt log-probabilities and hidden states of both stacks on the real model: known answers, equal bits throughout."""

import numpy as np
import pytest
import torch

from protos.wire.enums import HiddenMode, RowFailure, RowStatus
from protos.wire.plan import LogprobColumns
from tests.support import plans
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


def poison_page(name, worker, page):
    """Not-a-number in every slot of a page, in every layer."""
    runner = worker._dispatch._runners[-1]
    if name == "native":
        runner._model.kv_pages(0)[:, page] = np.nan
        return
    pool = runner.context._attention[0].pool
    for layer in range(pool.geometry.num_layers):
        pool.keys(layer)[:, page] = torch.nan


def test_a_poisoned_page_fails_its_row_alone_with_its_reason_and_the_others_are_delivered(stack):
    name, worker = stack
    ids = [case["prompt_ids"][:20] for case in CASES[:3]]

    def decoded(*, poisons):
        info, pages = worker.worker_info(), [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
        rows = [plans.extend(0, 20, ids=of, pages=held[:2]) for of, held in zip(ids, pages, strict=True)]
        worker.reset()
        first = worker.execute(plans.make_plan(rows, info=info, seq=1))
        if poisons:
            poison_page(name, worker, pages[1][0])
        tokens = first.rows.token_ids.tolist()
        rows = [plans.decode(20, ids=[token], pages=held[:2]) for token, held in zip(tokens, pages, strict=True)]
        wanted = LogprobColumns(output_wanted=plans.u8(1, 1, 1), output_top_counts=plans.u8(3, 3, 3))
        return worker.execute(plans.make_plan(rows, info=info, seq=2, logprobs=wanted))

    well, poisoned = decoded(poisons=False), decoded(poisons=True)
    assert poisoned.rows.statuses.tolist() == [RowStatus.TOKEN, RowStatus.FAILED, RowStatus.TOKEN]
    assert poisoned.rows.failures.tolist() == [0, RowFailure.NAN, 0]
    assert poisoned.rows.finite.tolist() == [1, 0, 1]
    for row in (0, 2):
        assert poisoned.rows.token_ids[row] == well.rows.token_ids[row]
        assert poisoned.logprobs.output[row] == well.logprobs.output[row]
    assert np.diff(poisoned.logprobs.output_top_indptr).tolist() == [3, 0, 3]
