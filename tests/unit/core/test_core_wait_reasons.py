"""What those who wait are said to wait for, in every situation in which somebody waits."""

import numpy as np

from scheduler_svc.core.events import Grammar, ReaderPaused, ReaderResumed
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.wait_reasons import WaitReason, weightiest
from tests.support.core_harness import CoreHarness, make_spec, small_info

BOOK = [3 * index for index in range(24)]


def waits(harness: CoreHarness) -> dict[WaitReason, int]:
    counts = harness.state.last_look.count(harness.state.waiting)
    assert counts.total() == len(harness.state.waiting)
    return dict(counts)


def make_harness(*, budget_tokens: int = 64, **changes: object) -> CoreHarness:
    harness = CoreHarness(CoreSettings(budget_tokens=budget_tokens))
    harness.attach(info=small_info(**changes))
    return harness


def test_nobody_waits_when_all_are_placed():
    harness = make_harness()
    harness.submit(make_spec(1), make_spec(2))

    assert waits(harness) == {}


def test_for_rows():
    harness = make_harness(max_rows=1)
    harness.submit(make_spec(1), make_spec(2), make_spec(3))

    assert waits(harness) == {WaitReason.ROWS: 2}


def test_for_pages_the_first_who_finds_none_and_all_behind():
    harness = make_harness(num_pages=9)
    harness.submit(make_spec(1, prompt=20, max_tokens=12), make_spec(2, prompt=20, max_tokens=12), make_spec(3))

    assert waits(harness) == {WaitReason.PAGES: 2}


def test_for_the_budget():
    harness = make_harness(budget_tokens=8, num_pages=200)
    harness.submit(make_spec(1, prompt=60), make_spec(2), make_spec(3))

    assert waits(harness) == {WaitReason.BUDGET: 2}


def test_for_a_prefix_that_another_computes():
    harness = make_harness()
    harness.submit(make_spec(1, prompt=BOOK), make_spec(2, prompt=[*BOOK, 1]), make_spec(3, prompt=[*BOOK, 2]))

    assert waits(harness) == {WaitReason.PREFIX: 2}
    harness.run()
    assert waits(harness) == {}


def test_for_a_worker():
    harness = make_harness()
    harness.lose()
    harness.submit(make_spec(1))
    assert waits(harness) == {WaitReason.WORKER: 1}

    harness.attach("w0")
    assert waits(harness) == {}


def test_for_a_worker_that_it_would_fit():
    harness = make_harness(num_pages=9)
    harness.attach("w1", small_info(num_pages=3))
    harness.lose("w0")
    harness.submit(make_spec(1, prompt=20), make_spec(2, prompt=2, max_tokens=2))

    assert waits(harness) == {WaitReason.WORKER: 1}


def test_for_a_mask_or_a_reader_before_anything_else():
    harness = make_harness(max_rows=1)
    harness.submit(make_spec(1), make_spec(2, grammar=Grammar("regex", "ab")), make_spec(3), make_spec(4))
    harness.step(ReaderPaused(make_spec(3).stream))
    assert waits(harness) == {WaitReason.GRAMMAR: 1, WaitReason.PAUSED: 1, WaitReason.ROWS: 1}

    harness.answer_mask()
    harness.step(ReaderResumed(make_spec(3).stream))
    assert waits(harness) == {WaitReason.ROWS: 3}


def test_behind_more_than_are_passed_over_in_one_step(monkeypatch):
    monkeypatch.setattr("scheduler_svc.core.placement._MOST_PASSED_OVER", 3)
    harness = make_harness()
    harness.submit(*[make_spec(index, prompt=[*BOOK, index]) for index in range(9)])

    assert waits(harness) == {WaitReason.PREFIX: 8}


def test_with_several_workers_the_weightiest_reason_is_told():
    assert weightiest([WaitReason.BUDGET, WaitReason.PAGES, WaitReason.ROWS]) is WaitReason.PAGES
    assert weightiest([]) is WaitReason.WORKER
    harness = CoreHarness(CoreSettings(budget_tokens=4))
    harness.attach("w0", small_info(max_rows=1))
    harness.attach("w1", small_info(num_pages=200))
    harness.submit(*[make_spec(index, prompt=np.full(30, index).tolist()) for index in range(5)])

    assert waits(harness) == {WaitReason.ROWS: 3}
