"""The pure decisions of a link: what is sent again, which result counts, when a term is over."""

from dataclasses import replace

import pytest

from protos.wire.errors import (
    ConnectionLost,
    DataFault,
    DeviceFault,
    Draining,
    Loading,
    NoServer,
    StaleEpoch,
    SyncError,
    UnavailableError,
    WrongIncarnation,
)
from protos.wire.result import ForwardResult
from scheduler_svc.links.exchange import MAX_FRUITLESS_STREAMS, PlanExchange, device_seq, is_death, may_reopen
from scheduler_svc.links.link_messages import LinkNack, PlansMissing, Report, Term
from scheduler_svc.links.liveness import Liveness, LivenessLimits
from tests.support.core_harness import small_info
from tests.support.plans import extend, make_identity, make_plan

INFO = small_info(window=3)
TERM = Term(worker="w0", epoch=2, term=5, info=INFO)
LIMITS = LivenessLimits(report_late_s=1.0, report_lost_s=2.75, plan_timeout_s=60.0)
LOST = ConnectionLost("lost")
BUDGET_S = make_identity().budget_ms / 1000
REPORT = Report(
    incarnation=INFO.incarnation, state=None, device_counter=-1, capture_budget_s=0.0, started_seq=7, finished_seq=6
)


def identity(seq):
    return make_identity(seq=seq, epoch=2, term=5, incarnation=INFO.incarnation)


def result(seq, **changes):
    return ForwardResult(identity=replace(identity(seq), **changes))


def exchange(*, plans=0):
    made = PlanExchange(TERM, liveness=Liveness(LIMITS, now=0.0), min_delta_bytes=1 << 20, reopen_s=2.0)
    made.next_opening()
    made.opened(1, 0.0)
    for seq in range(1, plans + 1):
        made.send(make_plan([extend(0, 3)], info=INFO, identity=identity(seq)), 0.0)
    return made


def seqs(messages):
    return [message.seq for message in messages]


def test_a_new_stream_has_a_higher_number_and_carries_what_has_no_result():
    term = exchange(plans=3)
    assert term.take(result(1), 0.1).result.identity.seq == 1
    assert term.broke(LOST, 0.2) is None
    assert [term.next_opening().stream_number for _ in range(2)] == [2, 3]
    assert seqs(term.opened(3, 0.3)) == [2, 3]


def test_the_time_this_process_stood_still_is_none_in_which_a_stream_may_be_opened_again():
    term = exchange(plans=1)
    assert term.broke(LOST, 0.2) is None
    term.forgive(7.2, stalled_s=6.5)
    assert term.broke(LOST, 8.6) is None
    assert term.broke(LOST, 8.8) is LOST


@pytest.mark.parametrize("expected_seq", [1, 5])
def test_a_worker_that_lost_or_invented_plans_ends_the_term(expected_seq):
    term = exchange(plans=3)
    term.take(result(1), 0.1)
    with pytest.raises(SyncError):
        term.opened(expected_seq, 0.2)


@pytest.mark.parametrize("changes", [{"epoch": 1}, {"term": 4}, {"incarnation": b"x" * 16}])
def test_a_result_of_another_life_does_not_count(changes):
    term = exchange(plans=1)
    assert term.take(result(1, **changes), 0.1) is None
    assert term.take(result(1), 0.1) is not None


def test_a_result_counts_once_and_in_order():
    term = exchange(plans=3)
    term.take(result(1), 0.1)
    assert term.take(result(1), 0.2) is None
    with pytest.raises(SyncError):
        term.take(result(3), 0.2)


def test_a_broken_stream_is_opened_again_for_two_seconds():
    term = exchange(plans=1)
    assert term.broke(LOST, 10.0) is None
    assert term.is_suspect(10.0)
    assert term.broke(LOST, 11.9) is None
    assert term.broke(LOST, 12.0) is LOST


def test_an_open_stream_is_trusted_again():
    term = exchange(plans=1)
    term.broke(LOST, 0.1)
    term.opened(1, 0.2)
    assert not term.is_suspect(0.2)


@pytest.mark.parametrize(
    ("expected_seq", "started", "finished", "is_lost"),
    [(3, 1, 0, True), (2, 1, 0, True), (3, 1, 1, False), (3, 2, 1, False), (2, 0, 0, False), (1, 0, 0, False)],
)
def test_a_new_stream_gives_no_time_to_the_plan_that_the_device_computes(expected_seq, started, finished, is_lost):
    term = exchange(plans=2)
    report = replace(REPORT, pair=(TERM.epoch, TERM.term), started_seq=started, finished_seq=finished)
    term.reported(report, 0.0)
    assert term.broke(LOST, BUDGET_S - 1.5) is None
    term.opened(expected_seq, BUDGET_S - 0.2)
    term.reported(report, BUDGET_S)
    assert (term.liveness.verdict(BUDGET_S) is not None) is is_lost


def test_plans_of_another_term_are_not_taken_for_ours():
    assert device_seq(replace(REPORT, pair=(4, 3)), (4, 3)) == 7
    assert device_seq(replace(REPORT, pair=(4, 2)), (4, 3)) == 0
    assert device_seq(replace(REPORT, pair=(4, 3), finished_seq=7), (4, 3)) == 0


def test_streams_that_break_without_a_result_end_the_term_and_a_result_starts_the_count_anew():
    term = exchange(plans=2)
    for _ in range(MAX_FRUITLESS_STREAMS):
        assert term.broke(LOST, 0.1) is None
        term.opened(1, 0.1)
    term.take(result(1), 0.2)
    for _ in range(MAX_FRUITLESS_STREAMS):
        assert term.broke(LOST, 0.3) is None
        term.opened(2, 0.3)
    assert term.broke(LOST, 0.4) is LOST


def test_a_report_of_another_process_ends_the_term():
    report = Report(incarnation=b"x" * 16, state=None, device_counter=1, capture_budget_s=0.0)
    with pytest.raises(WrongIncarnation):
        exchange().reported(report, 0.1)


def test_a_gap_is_filled_and_a_stale_answer_is_not():
    term = exchange(plans=3)
    assert seqs(term.resend(PlansMissing(2, 3))) == [2, 3]
    with pytest.raises(SyncError):
        term.resend(LinkNack("stale"))


@pytest.mark.parametrize(
    ("error", "reopens", "dies"),
    [
        (LOST, True, True),
        (UnavailableError("the stream ended"), True, True),
        (DataFault("a checksum"), True, False),
        (NoServer("nobody listens"), False, True),
        (Loading("just started"), False, True),
        (WrongIncarnation("restarted"), False, True),
        (DeviceFault("broken"), False, True),
        (Draining("told to leave"), False, False),
        (StaleEpoch("fenced", highest_epoch=9, highest_term=1), False, False),
        (SyncError("a bug"), False, False),
    ],
    ids=lambda value: value.reason if isinstance(value, Exception) else str(value),
)
def test_what_may_be_the_network_and_what_may_be_a_death(error, reopens, dies):
    assert (may_reopen(error), is_death(error)) == (reopens, dies)
    assert (exchange(plans=1).broke(error, 0.1) is None) is reopens
