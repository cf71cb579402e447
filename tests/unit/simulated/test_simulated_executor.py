"""The simulated device gives the tokens of the pure model, and other ones for a wrong page, order or reference."""

from dataclasses import replace

import numpy as np
import pytest

from protos.wire.enums import RowFailure, RowStatus
from protos.wire.errors import InvalidRequest
from protos.wire.plan import Mask, MaskColumns, PenaltyColumns, SamplingColumns
from protos.wire.simulated_tokens import TokenDraw, expected_tokens
from protos.wire.validate import validate_plan
from tests.support import plans
from tests.support.plan_driver import PlanDriver, Request
from tests.support.simulated import EOS_ID, card, simulated_executor, vocabulary
from worker_svc.simulated.build import SimulatedSettings, build_simulated_executor

PROMPT = tuple(range(100, 140))
PAGES = (5, 9, 3)
NEXT = expected_tokens(PROMPT, 8, vocabulary=vocabulary())


@pytest.fixture
def executor():
    return simulated_executor()


def run(executor, *rows, seq=1, **groups):
    plan = plans.make_plan(rows, info=executor.worker_info(), seq=seq, **groups)
    validate_plan(plan, executor.worker_info())
    return executor.execute(plan).rows


def prefill(executor, ids=PROMPT, pages=PAGES, **changes):
    return run(executor, plans.extend(0, len(ids), ids=ids, pages=pages, **changes))


def next_row(pages=PAGES, token=NEXT[0], **changes):
    return plans.decode(len(PROMPT), ids=[token], pages=pages, **changes)


def test_requests_get_the_tokens_of_the_model_whatever_their_chunks_and_batch_mates():
    requests = [
        Request(prompt_ids=range(n, 3 * n + 5), max_new=20, temperature=0.7 * (n % 2), seed=n, top_p=0.9, top_k=n % 3)
        for n in range(10, 30)
    ]
    for budget in (16, 37, 256):
        fresh = [replace(request, token_ids=[], pages=[], kv_len=0) for request in requests]
        found = PlanDriver(simulated_executor(), budget_tokens=budget, page_seed=budget).run(*fresh)
        draws = [
            TokenDraw(temperature=request.temperature, seed=request.seed, top_p=0.9, top_k=request.top_k)
            for request in requests
        ]
        assert found == [
            expected_tokens(request.prompt_ids, 20, vocabulary=vocabulary(), draw=draw)
            for request, draw in zip(requests, draws, strict=True)
        ]


def test_a_right_decode_goes_on(executor):
    assert prefill(executor).token_ids.tolist() == NEXT[:1]
    assert run(executor, next_row()).token_ids.tolist() == NEXT[1:2]


@pytest.mark.parametrize("pages", [(9, 5, 3), (5, 3, 9), (5, 9, 8), (5, 8, 3), (8, 9, 3)])
def test_a_wrong_page_anywhere_is_a_wrong_token(executor, pages):
    prefill(executor)
    assert run(executor, next_row(pages)).token_ids.tolist() != NEXT[1:2]


def test_pages_of_another_sequence_are_a_wrong_token(executor):
    prefill(executor)
    prefill(executor, ids=[7, *PROMPT[1:]], pages=(6, 7, 8))
    assert run(executor, next_row((6, 9, 3))).token_ids.tolist() != NEXT[1:2]


def test_only_the_last_page_is_looked_at_when_asked_for():
    executor = simulated_executor(checks_pages=False)
    prefill(executor)
    assert run(executor, next_row((8, 11, 3))).token_ids.tolist() == NEXT[1:2]
    assert run(executor, next_row((5, 9, 11))).token_ids.tolist() != NEXT[1:2]


def test_a_skipped_chunk_is_a_wrong_token(executor):
    run(executor, plans.extend(0, 16, ids=PROMPT[:16], pages=PAGES[:1], samples=0))
    found = run(executor, plans.extend(32, 8, ids=PROMPT[32:], pages=PAGES))
    assert found.token_ids.tolist() != NEXT[:1]


def test_a_page_overwritten_by_another_is_a_wrong_token(executor):
    prefill(executor)
    run(executor, plans.extend(0, 16, ids=range(16), pages=(9,), handle=5))
    assert run(executor, next_row()).token_ids.tolist() != NEXT[1:2]


def test_a_reference_is_the_token_of_the_earlier_plan(executor):
    prefill(executor, handle=1)
    found = run(executor, next_row(handle=1, reference=(1, 0)), seq=2)
    assert found.token_ids.tolist() == NEXT[1:2]


@pytest.mark.parametrize(
    ("row", "seq"),
    [
        (next_row(handle=2, reference=(1, 0)), 2),
        (next_row(handle=1, attempt=1, reference=(1, 0)), 2),
        (next_row(handle=1, reference=(1, 1)), 2),
        (next_row(handle=1, reference=(2, 0)), 3),
        (plans.decode(41, pages=PAGES, handle=1, reference=(1, 0)), 2),
    ],
)
def test_a_reference_that_leads_nowhere_fails_its_row_and_writes_nothing(executor, row, seq):
    prefill(executor, handle=1)
    found = run(executor, row, seq=seq)
    assert found.statuses.tolist() == [RowStatus.FAILED]
    assert found.failures.tolist() == [RowFailure.DEPENDENCY]
    assert run(executor, next_row(handle=1), seq=seq + 1).token_ids.tolist() == NEXT[1:2]


def test_a_row_that_failed_fails_its_dependants_and_nobody_else(executor):
    prefill(executor, handle=1)
    run(executor, next_row(handle=1, attempt=1, reference=(1, 0)), seq=2)
    later = plans.decode(len(PROMPT) + 1, pages=PAGES, handle=1, attempt=1, reference=(2, 0))
    mate = plans.extend(0, len(PROMPT), ids=PROMPT, pages=(30, 31, 32), handle=2)
    found = run(executor, later, mate, seq=3)
    assert found.statuses.tolist() == [RowStatus.FAILED, RowStatus.TOKEN]
    assert found.failures.tolist() == [RowFailure.DEPENDENCY, 0]
    assert found.token_ids.tolist() == [0, NEXT[0]]


def test_a_reference_beyond_the_memory_or_before_a_reset_fails(executor):
    prefill(executor, handle=1)
    executor.reset()
    assert run(executor, next_row(handle=1, reference=(1, 0)), seq=2).statuses.tolist() == [RowStatus.FAILED]


def prefill_with(executor, groups):
    plan_row = plans.extend(0, len(PROMPT), ids=PROMPT, pages=PAGES)
    return run(executor, plan_row, **groups)


def masks(*masks_of_rows):
    return {"masks": MaskColumns(masks=masks_of_rows, row_masks=plans.u32(1))}


def test_masks_bias_and_penalties_change_the_token(executor):
    first = NEXT[0]
    allowed = Mask(allowed_ids=plans.u32(4, 5, 6))
    assert prefill_with(executor, masks(allowed)).token_ids[0] in (4, 5, 6)
    denied = Mask(denied_ids=plans.u32(first))
    assert prefill_with(executor, masks(denied)).token_ids[0] != first
    bias = SamplingColumns(bias_indptr=plans.u32(0, 1), bias_ids=plans.u32(77), bias_values=plans.f32(100))
    assert prefill_with(executor, {"sampling": bias}).token_ids.tolist() == [77]
    penalties = PenaltyColumns(
        repetition=plans.f32(1),
        frequency=plans.f32(2),
        presence=plans.f32(0),
        prompt_indptr=plans.u32(0, 0),
        prompt_ids=plans.u32(),
        output_indptr=plans.u32(0, 1),
        output_ids=plans.u32(first),
        output_counts=plans.u32(3),
    )
    assert prefill_with(executor, {"penalties": penalties}).token_ids[0] != first


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperatures": plans.f32(0.9), "seeds": plans.u64(5)},
        {"temperatures": plans.f32(1.5), "seeds": plans.u64(6), "top_ks": plans.u32(4)},
        {"temperatures": plans.f32(1.5), "seeds": plans.u64(7), "top_ps": plans.f32(0.8)},
        {"temperatures": plans.f32(2.0), "seeds": plans.u64(8), "min_ps": plans.f32(0.1)},
    ],
)
def test_a_mask_that_allows_everything_changes_nothing(executor, sampling):
    columns = {"sampling": SamplingColumns(**sampling)}
    everything = masks(Mask(denied_ids=plans.u32(EOS_ID)))
    assert prefill_with(executor, columns).token_ids.tolist() == prefill_with(executor, columns | everything).token_ids


def test_a_mask_of_one_id_wins_over_the_lowest_bias_and_touches_no_neighbour(executor):
    lowest = float(np.finfo(np.float32).min)
    bias = SamplingColumns(bias_indptr=plans.u32(0, 1, 1), bias_ids=plans.u32(4), bias_values=plans.f32(lowest))
    only = MaskColumns(masks=(Mask(allowed_ids=plans.u32(4)),), row_masks=plans.u32(1, 0))
    rows = [plans.extend(0, 8), plans.extend(0, 40, ids=PROMPT, pages=PAGES)]
    found = run(executor, *rows, sampling=bias, masks=only)
    assert found.token_ids.tolist() == [4, NEXT[0]]


def test_log_probabilities_are_those_of_the_distribution(executor):
    request = Request(prompt_ids=PROMPT, max_new=4, top_logprobs=3)
    PlanDriver(executor).run(request)
    np.testing.assert_allclose(request.logprobs, [-np.log(2)] * 4, rtol=1e-6)
    assert [entry[0][0] for entry in request.top] == NEXT[:4]
    np.testing.assert_allclose([value for _, value in request.top[0]], np.log([1 / 2, 1 / 4, 1 / 8]), rtol=1e-6)


def test_the_pool_is_what_the_table_says_unless_it_is_named():
    info = build_simulated_executor(card(), SimulatedSettings()).worker_info()
    (pool,) = info.sub_pools
    assert (pool.num_pages, pool.bytes_per_page) == (53_940_000_000 // (131_072 * 16), 131_072 * 16)
    assert (info.numerics, info.device, info.limits.window) == ("simulated", "simulated", 2)
    with pytest.raises(InvalidRequest, match="1 pages, allowed are 2"):
        simulated_executor(num_pages=1)
