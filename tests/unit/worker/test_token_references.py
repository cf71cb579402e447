"""Plans that name tokens which earlier plans sampled, on the history model: a wrong token is a wrong history."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from protos.wire.codec import decode_plan, encode_plan
from protos.wire.enums import Feature, ForwardMode, RowFailure, RowStatus
from protos.wire.plan import MaskColumns, PenaltyColumns, TokenColumns
from protos.wire.validate import validate_plan
from tests.support import oracle, plans
from tests.support.plans import f32, u8, u32, u64
from tests.support.tiny_model import POISON, WIDTH, HistoryRunner, history_logits, tiny_worker
from worker_svc.batch.canary_guard import CanaryVerdict, CanaryViolation

INFO = plans.make_info(
    logits_width=WIDTH,
    features=frozenset({Feature.TOKEN_REFERENCES, Feature.PENALTIES, Feature.MASKS}),
    limits=plans.make_limits(window=2),
)
PROMPTS = ([1, 2, 3], [4, 5], [6, 7, 8, 9])
SINK = 0


class TolerantRunner(HistoryRunner):
    """A row without its source reads what was in its slots: nothing to assert about."""

    def _history(self, batch, pages, row):
        try:
            return super()._history(batch, pages, row)
        except AssertionError:
            return [POISON]


def best(history):
    return int(history_logits(history).argmax())


def prefill(seq=1, prompts=PROMPTS, **changes):
    rows = [
        plans.extend(0, len(prompt), ids=prompt, handle=10 + row, pages=[row + 1]) for row, prompt in enumerate(prompts)
    ]
    return plans.make_plan(rows, info=INFO, seq=seq, **changes)


def referring(seq, sources, *, cached=0, prompts=PROMPTS, **changes):
    """One decode row for each (row of the prompts, plan, row there), whose token is that reference."""
    rows = [
        plans.decode(len(prompts[row]) + cached, handle=10 + row, pages=[row + 1], ids=[0]) for row, _, _ in sources
    ]
    plan = plans.make_plan(rows, info=INFO, seq=seq, **changes)
    tokens = TokenColumns(
        ids=plan.tokens.ids,
        sources=u8(*[1] * len(sources)),
        ref_seqs=u64(*(source_seq for _, source_seq, _ in sources)),
        ref_rows=u32(*(source_row for _, _, source_row in sources)),
    )
    return replace(plan, tokens=tokens)


def run(worker, plan):
    """Through bytes and validation, as a plan arrives."""
    plan = decode_plan(encode_plan(plan))
    validate_plan(plan, INFO)
    return worker.execute(plan).rows


def outcome(rows):
    failures = rows.failures if rows.failures is not None else np.zeros(len(rows.handles), np.uint8)
    pairs = zip(rows.statuses.tolist(), failures.tolist(), strict=True)
    return [RowStatus(status).name if not failure else RowFailure(failure).name for status, failure in pairs]


def test_referenced_tokens_go_on_as_literal_ones_in_any_order_of_rows():
    worker = tiny_worker(INFO)
    run(worker, prefill())
    rows = run(worker, referring(2, [(2, 1, 2), (0, 1, 0)]))
    expected = [best([*prompt, best(prompt)]) for prompt in (PROMPTS[2], PROMPTS[0])]
    assert rows.token_ids.tolist() == expected
    rows = run(worker, referring(3, [(0, 2, 1)], cached=1))
    assert rows.token_ids.tolist() == [best([*PROMPTS[0], best(PROMPTS[0]), expected[1]])]


def test_references_into_and_out_of_plans_of_several_forwards():
    worker = tiny_worker(INFO)
    first = prefill()
    rows = [plans.extend(0, len(prompt)) for prompt in PROMPTS]
    split = (plans.whole_forward(rows[:1]), plans.whole_forward(rows[1:], row_begin=1, row_end=3))
    run(worker, replace(first, forwards=split))
    second = referring(2, [(0, 1, 0), (1, 1, 1), (2, 1, 2)])
    decode = [plans.decode(1)]
    forwards = (
        plans.whole_forward(decode, row_begin=0, row_end=1),
        plans.whole_forward(decode * 2, row_begin=1, row_end=3),
    )
    assert run(worker, replace(second, forwards=forwards)).token_ids.tolist() == [
        best([*prompt, best(prompt)]) for prompt in PROMPTS
    ]


def test_a_reference_beside_literals_of_other_rows():
    worker = tiny_worker(INFO)
    run(worker, prefill())
    rows = [
        plans.decode(3, handle=10, pages=[1], ids=[0]),
        plans.extend(0, 4, handle=99, pages=[9], ids=[20, 21, 22, 23]),
    ]
    plan = plans.make_plan(rows, info=INFO, seq=2, mode=ForwardMode["MIXED"])
    tokens = replace(plan.tokens, sources=u8(1, 0, 0, 0, 0), ref_seqs=u64(1), ref_rows=u32(0))
    got = run(worker, replace(plan, tokens=tokens))
    assert got.token_ids.tolist() == [best([*PROMPTS[0], best(PROMPTS[0])]), best([20, 21, 22, 23])]


def test_penalties_count_the_referenced_token():
    strengths = {"repetition": f32(1.6, 1.0), "frequency": f32(0.7, 0.0), "presence": f32(1.1, 0.0)}
    first = best(PROMPTS[0])
    known = [first, 55, 55]
    penalties = PenaltyColumns(
        **strengths,
        prompt_indptr=u32(0, 2, 2),
        prompt_ids=u32(1, 3),
        output_indptr=u32(0, 2, 2),
        output_ids=u32(first, 55),
        output_counts=u32(1, 2),
    )
    worker = tiny_worker(INFO)
    run(worker, prefill())
    rows = run(worker, referring(2, [(0, 1, 0), (1, 1, 1)], penalties=penalties))
    ruled = oracle.ruled_logits(
        history_logits([*PROMPTS[0], first]),
        prompt=[1, 3],
        output=[*known, first],
        bias={},
        allowed=None,
        repetition=1.6,
        frequency=0.7,
        presence=1.1,
    )
    assert rows.token_ids.tolist() == [int(ruled.argmax()), best([*PROMPTS[1], best(PROMPTS[1])])]


def test_masks_beside_references_keep_to_their_rows():
    worker = tiny_worker(INFO)
    run(worker, prefill())
    usual = best([*PROMPTS[0], best(PROMPTS[0])])
    masks = MaskColumns(masks=(plans.Mask(denied_ids=u32(usual)),), row_masks=u32(1, 0))
    rows = run(worker, referring(2, [(0, 1, 0), (1, 1, 1)], masks=masks))
    assert rows.token_ids[0] != usual
    assert rows.token_ids[1] == best([*PROMPTS[1], best(PROMPTS[1])])


LOST = {
    "a plan that never ran": ([(0, 1, 0)], 3),
    "a row that is not the sequence's": ([(0, 1, 1)], 2),
    "a row beyond the plan's": ([(0, 1, 7)], 2),
    "a row that failed": ([(1, 1, 1)], 2),
    "a plan beyond the ring": ([(0, 1, 0)], 12),
}


@pytest.mark.parametrize("name", LOST)
def test_a_reference_that_finds_nothing_fails_its_row_alone_and_writes_no_kv(name):
    prompts = ([1, 2, 3], [POISON, 5], [6, 7, 8, 9])
    runner = TolerantRunner(INFO)
    worker = tiny_worker(INFO, [runner])
    sources, seq = LOST[name]
    if name != "a plan that never ran":
        run(worker, prefill(prompts=prompts))
    for other in range(2, seq):
        run(worker, prefill(seq=other, prompts=prompts[2:]))
    (row, _, _) = sources[0]
    slot = (row + 1) * 16 + len(prompts[row])
    before = runner.slot_ids[slot]
    mate = plans.decode(0, handle=50, pages=[30], ids=[44])
    plan = referring(seq, sources, prompts=prompts)
    lost = plans.decode(len(prompts[row]), handle=10 + row, pages=[row + 1], ids=[0])
    both = plans.make_plan([lost, mate], info=INFO, seq=seq)
    tokens = replace(plan.tokens, ids=both.tokens.ids, sources=u8(1, 0))
    got = run(worker, replace(both, tokens=tokens))
    assert outcome(got) == ["DEPENDENCY", "TOKEN"]
    assert got.token_ids.tolist() == [0, best([44])]
    assert got.finite.tolist() == [1, 1], "a lost source says nothing of the numbers"
    assert runner.slot_ids[slot] == before
    assert runner.batches[-1].page_groups[0].out_cache_loc.tolist() == [SINK, 30 * 16]
    dependant = referring(seq + 1, [(row, seq, 0)], cached=1, prompts=prompts)
    assert outcome(run(worker, dependant)) == ["DEPENDENCY"], "failure spreads to dependants"


def test_a_reset_forgets_every_token():
    worker = tiny_worker(INFO, [TolerantRunner(INFO)])
    run(worker, prefill())
    worker.reset()
    assert outcome(run(worker, referring(2, [(0, 1, 0)]))) == ["DEPENDENCY"]


def test_a_plan_is_staged_before_its_sources_ran_and_may_be_dropped():
    worker = tiny_worker(INFO)
    first = worker.stage(prefill())
    second = worker.stage(referring(2, [(0, 1, 0)]))
    worker.stage(referring(2, [(1, 1, 1)]))
    first()
    assert second().rows.token_ids.tolist() == [best([*PROMPTS[0], best(PROMPTS[0])])]
    assert torch.is_inference_mode_enabled() is False


def test_a_row_without_its_source_is_not_blamed_for_what_it_would_have_read():
    """What the failed row before it did not write is no violation of this one."""
    wrong = [
        CanaryViolation(row=row, position=1, slot=2, sub_pool=0, found_token=-1, found_position=-1) for row in (0, 2)
    ]
    verdict = CanaryVerdict(is_bad=np.array([True, False, True]), violations=tuple(wrong))
    left = verdict.without(np.array([True, True, False]))
    assert left.is_bad.tolist() == [False, False, True]
    assert [violation.row for violation in left.violations] == [2]
    assert verdict.without(np.array([False, True, False])) is verdict
