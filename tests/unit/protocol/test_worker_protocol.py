"""Attach, order, idempotence and fencing, one rule a test."""

import pytest

from protos.wire.errors import (
    DataFault,
    DeviceFault,
    Draining,
    InvalidRequest,
    ProtocolMismatch,
    StaleEpoch,
    SyncError,
    WindowFull,
    WrongIncarnation,
)
from protos.wire.result import ForwardResult, PlanRejection
from tests.support.plans import INCARNATION, extend, make_identity, make_info, make_limits, make_plan
from worker_svc.protocol.messages import (
    AnswerAttach,
    ArrivedPlan,
    AttachCall,
    DrainAnswer,
    EndStream,
    Execute,
    Fence,
    MissingBase,
    NeedFullAnswer,
    OpenedAnswer,
    PlanResult,
    RefuseAttach,
    Reply,
    ResetExecutor,
    SequenceGapAnswer,
    StaleAnswer,
    Stopped,
    StreamOpening,
)
from worker_svc.protocol.worker_protocol import WorkerProtocol

STREAM = 100


def worker_info(*, window=1, cached_results=3):
    return make_info(limits=make_limits(window=window, cached_results=cached_results))


def identity(seq, *, epoch=1, term=1, incarnation=INCARNATION):
    return make_identity(seq=seq, epoch=epoch, term=term, incarnation=incarnation)


def attach_call(epoch=1, term=1, **changes):
    return AttachCall(**{"epoch": epoch, "term": term, "protocol_min": 1, "protocol_max": 1, **changes})


def opening(*, stream_number=1, epoch=1, term=1, incarnation=INCARNATION):
    return StreamOpening(epoch=epoch, term=term, incarnation=incarnation, stream_number=stream_number)


def plan(seq, **fence):
    named = identity(seq, **fence)
    return ArrivedPlan(named, make_plan([extend(0, 3)], identity=named))


def rejected(seq):
    return ArrivedPlan(identity(seq), PlanRejection(reason="INVALID_PLAN", field="rows", row=0, message="m"))


def result(seq, **fence):
    return ForwardResult(identity=identity(seq, **fence))


def attached(window=1, cached_results=3):
    protocol = WorkerProtocol(worker_info(window=window, cached_results=cached_results))
    protocol.attach_requested(1, attach_call())
    protocol.executor_reset()
    return protocol


def opened(window=1, cached_results=3):
    protocol = attached(window, cached_results)
    protocol.stream_opened(STREAM, opening())
    return protocol


def ran(protocol, *seqs):
    for seq in seqs:
        protocol.plan_received(STREAM, plan(seq))
        protocol.plan_finished(result(seq))
    return protocol


# --- attach


def test_a_new_pair_resets_the_executor_before_it_is_answered():
    protocol = WorkerProtocol(worker_info())
    assert protocol.attach_requested(1, attach_call(3, 4)) == [ResetExecutor(Fence(3, 4))]
    assert protocol.executor_reset() == [AnswerAttach(1, worker_info())]


def test_an_identical_retry_gets_the_stored_answer_and_resets_nothing():
    protocol = ran(opened(), 1)
    assert protocol.attach_requested(2, attach_call()) == [AnswerAttach(2, worker_info())]
    assert [type(action) for action in protocol.plan_received(STREAM, plan(2))] == [Execute]


def test_a_retry_while_the_device_is_awaited_is_answered_with_the_first_call():
    protocol = WorkerProtocol(worker_info())
    protocol.attach_requested(1, attach_call())
    assert protocol.attach_requested(2, attach_call()) == []
    assert protocol.executor_reset() == [AnswerAttach(1, worker_info()), AnswerAttach(2, worker_info())]


@pytest.mark.parametrize(
    "asked", [attach_call(2, 4), attach_call(1, 9), attach_call(0, 0), attach_call(2, 5, scheduler_name="another")]
)
def test_a_pair_not_above_the_highest_is_refused_with_that_pair(asked):
    protocol = WorkerProtocol(worker_info())
    protocol.attach_requested(1, attach_call(2, 5))
    protocol.executor_reset()
    (refusal,) = protocol.attach_requested(2, asked)
    assert isinstance(refusal, RefuseAttach)
    assert isinstance(refusal.error, StaleEpoch)
    assert (refusal.error.highest_epoch, refusal.error.highest_term) == (2, 5)


def test_pairs_are_compared_as_pairs():
    protocol = WorkerProtocol(worker_info())
    protocol.attach_requested(1, attach_call(2, 5))
    protocol.executor_reset()
    assert protocol.attach_requested(2, attach_call(3, 1)) == [ResetExecutor(Fence(3, 1))]


@pytest.mark.parametrize(("low", "high"), [(2, 9), (0, 0)])
def test_a_peer_outside_the_protocol_range_is_refused_and_changes_nothing(low, high):
    protocol = WorkerProtocol(worker_info())
    (refusal,) = protocol.attach_requested(1, attach_call(9, 9, protocol_min=low, protocol_max=high))
    assert isinstance(refusal.error, ProtocolMismatch)
    assert protocol.attach_requested(2, attach_call(1, 1)) == [ResetExecutor(Fence(1, 1))]


def test_unknown_features_of_the_scheduler_are_fine():
    protocol = WorkerProtocol(worker_info())
    assert protocol.attach_requested(1, attach_call(features=(1, 9999))) == [ResetExecutor(Fence(1, 1))]


def test_a_higher_pair_waits_for_the_running_plan_and_drops_its_result():
    protocol = opened(window=2)
    protocol.plan_received(STREAM, plan(1))
    protocol.plan_received(STREAM, plan(2))
    (ended,) = protocol.attach_requested(2, attach_call(2, 1))
    assert (ended.stream, type(ended.error)) == (STREAM, StaleEpoch)
    assert protocol.plan_finished(result(1)) == [ResetExecutor(Fence(2, 1))]
    assert protocol.executor_reset() == [AnswerAttach(2, worker_info(window=2, cached_results=3))]
    assert protocol.stream_opened(9, opening(epoch=2)) == [Reply(9, OpenedAnswer(1))]
    assert [type(action) for action in protocol.plan_received(9, plan(1, epoch=2))] == [Execute]


def test_a_higher_pair_overtakes_one_that_still_waits():
    protocol = opened()
    protocol.plan_received(STREAM, plan(1))
    protocol.attach_requested(2, attach_call(2, 1))
    (refusal,) = protocol.attach_requested(3, attach_call(2, 2))
    assert (refusal.call, type(refusal.error), refusal.error.highest_term) == (2, StaleEpoch, 2)
    assert protocol.plan_finished(result(1)) == [ResetExecutor(Fence(2, 2))]
    assert [action.call for action in protocol.executor_reset()] == [3]


def test_a_higher_pair_during_the_reset_has_one_of_its_own_so_that_reports_name_it():
    protocol = WorkerProtocol(worker_info())
    protocol.attach_requested(1, attach_call(1, 1))
    (refusal,) = protocol.attach_requested(2, attach_call(1, 2))
    assert refusal.call == 1
    assert protocol.executor_reset() == [ResetExecutor(Fence(1, 2))]
    assert protocol.executor_reset() == [AnswerAttach(2, worker_info())]


# --- opening


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (opening(epoch=0), StaleEpoch),
        (opening(term=0), StaleEpoch),
        (opening(incarnation=bytes(16)), WrongIncarnation),
        (opening(epoch=2), InvalidRequest),
        (opening(stream_number=1), SyncError),
        (opening(stream_number=0), SyncError),
    ],
)
def test_a_stream_that_does_not_match_is_ended_and_the_open_one_stays(wrong, error):
    protocol = opened()
    (ended,) = protocol.stream_opened(7, wrong)
    assert (ended.stream, type(ended.error)) == (7, error)
    assert [type(action) for action in protocol.plan_received(STREAM, plan(1))] == [Execute]


def test_a_stream_before_the_attach_is_complete_is_ended():
    protocol = WorkerProtocol(worker_info())
    protocol.attach_requested(1, attach_call())
    (ended,) = protocol.stream_opened(7, opening())
    assert isinstance(ended.error, InvalidRequest)


def test_a_plan_before_the_opening_ends_the_call():
    protocol = attached()
    (ended,) = protocol.plan_received(7, plan(1))
    assert (ended.stream, type(ended.error)) == (7, InvalidRequest)


def test_a_second_opening_on_one_stream_ends_it():
    protocol = opened()
    (ended,) = protocol.stream_opened(STREAM, opening(stream_number=2))
    assert (ended.stream, type(ended.error)) == (STREAM, InvalidRequest)


def test_a_higher_stream_number_supersedes_and_expects_what_has_not_started():
    protocol = opened(window=3)
    for seq in (1, 2, 3):
        protocol.plan_received(STREAM, plan(seq))
    ended, reply = protocol.stream_opened(7, opening(stream_number=2))
    assert (ended.stream, type(ended.error)) == (STREAM, SyncError)
    assert reply == Reply(7, OpenedAnswer(2))


def test_a_running_plan_sent_again_is_not_run_again_and_answers_the_new_stream():
    protocol = opened()
    protocol.plan_received(STREAM, plan(1))
    protocol.stream_opened(7, opening(stream_number=2))
    assert protocol.plan_received(7, plan(1)) == []
    done = result(1)
    assert protocol.plan_finished(done) == [Reply(7, PlanResult(done))]


def test_a_result_the_new_stream_has_not_asked_for_waits_until_it_does():
    protocol = opened()
    protocol.plan_received(STREAM, plan(1))
    protocol.stream_opened(7, opening(stream_number=2))
    done = result(1)
    assert protocol.plan_finished(done) == []
    assert protocol.plan_received(7, plan(1)) == [Reply(7, PlanResult(done))]


def test_plans_of_a_lost_stream_run_on_and_their_results_are_kept():
    protocol = opened(window=2)
    protocol.plan_received(STREAM, plan(1))
    protocol.plan_received(STREAM, plan(2))
    assert protocol.stream_closed(STREAM) == []
    assert [type(action) for action in protocol.plan_finished(result(1))] == [Execute]
    assert protocol.plan_finished(result(2)) == []
    assert protocol.stream_opened(7, opening(stream_number=2)) == [Reply(7, OpenedAnswer(3))]
    assert [action.body.result.identity.seq for action in protocol.plan_received(7, plan(2))] == [2]


# --- order


def test_a_plan_runs_only_after_the_one_before_it():
    protocol = opened(window=2)
    assert [type(action) for action in protocol.plan_received(STREAM, plan(1))] == [Execute]
    assert protocol.plan_received(STREAM, plan(2)) == []
    reply, execute = protocol.plan_finished(result(1))
    assert (reply.body.result.identity.seq, execute.plan.identity.seq) == (1, 2)


def test_a_duplicate_of_a_waiting_or_running_plan_changes_nothing():
    protocol = opened(window=2)
    protocol.plan_received(STREAM, plan(1))
    protocol.plan_received(STREAM, plan(2))
    assert protocol.plan_received(STREAM, plan(1)) == []
    assert protocol.plan_received(STREAM, plan(2)) == []


def test_a_finished_plan_sent_again_gets_the_stored_result():
    protocol = ran(opened(), 1, 2)
    (reply,) = protocol.plan_received(STREAM, plan(1))
    assert reply.body.result.identity.seq == 1


def test_a_forgotten_plan_is_stale():
    protocol = ran(opened(cached_results=1), 1, 2, 3, 4)
    (reply,) = protocol.plan_received(STREAM, plan(1))
    assert reply.body == StaleAnswer(1, 5)
    (kept,) = protocol.plan_received(STREAM, plan(2))
    assert kept.body.result.identity.seq == 2, "window + 2 results are kept whatever the worker advertises"


def test_a_missing_plan_is_a_gap_and_consumes_nothing():
    protocol = opened()
    assert protocol.plan_received(STREAM, plan(2)) == [Reply(STREAM, SequenceGapAnswer(1, 2))]
    assert [type(action) for action in protocol.plan_received(STREAM, plan(1))] == [Execute]


def test_a_rejected_plan_takes_its_place_in_the_order_of_results():
    protocol = opened(window=3)
    protocol.plan_received(STREAM, plan(1))
    assert protocol.plan_received(STREAM, rejected(2)) == []
    protocol.plan_received(STREAM, plan(3))
    first, second, third = protocol.plan_finished(result(1))
    assert first.body.result.identity.seq == 1
    assert second.body.result.rejection.field == "rows"
    assert third.plan.identity.seq == 3


def test_a_rejected_plan_on_an_idle_device_is_answered_at_once():
    protocol = opened()
    (reply,) = protocol.plan_received(STREAM, rejected(1))
    assert reply.body.result.rejection.reason == "INVALID_PLAN"
    assert [type(action) for action in protocol.plan_received(STREAM, plan(2))] == [Execute]


def test_a_plan_over_the_window_is_refused_in_its_place():
    protocol = opened(window=1)
    protocol.plan_received(STREAM, plan(1))
    assert protocol.plan_received(STREAM, plan(2)) == []
    _, refused = protocol.plan_finished(result(1))
    assert refused.body.result.rejection.reason == WindowFull.reason
    assert [type(action) for action in protocol.plan_received(STREAM, plan(3))] == [Execute]


def test_a_sender_that_ignores_the_window_is_cut_off():
    protocol = opened(window=1)
    actions = [action for seq in range(1, 20) for action in protocol.plan_received(STREAM, plan(seq))]
    assert [type(getattr(action, "error", None)) for action in actions[1:2]] == [WindowFull]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (plan(1, epoch=0), StaleEpoch),
        (plan(1, term=0), StaleEpoch),
        (plan(1, incarnation=bytes(16)), WrongIncarnation),
        (plan(1, epoch=2), InvalidRequest),
    ],
)
def test_a_plan_of_another_life_ends_the_stream_and_runs_nothing(wrong, error):
    protocol = opened()
    (ended,) = protocol.plan_received(STREAM, wrong)
    assert (ended.stream, type(ended.error)) == (STREAM, error)


def test_an_unreadable_message_ends_the_stream_and_consumes_no_seq():
    protocol = opened()
    fault = DataFault("crc")
    assert protocol.message_unreadable(STREAM, fault) == [EndStream(STREAM, fault)]
    assert protocol.stream_opened(7, opening(stream_number=2)) == [Reply(7, OpenedAnswer(1))]


# --- ends


def test_a_caller_that_sends_nothing_more_gets_its_last_result_first():
    protocol = opened()
    protocol.plan_received(STREAM, plan(1))
    assert protocol.requests_ended(STREAM) == []
    reply, ended = protocol.plan_finished(result(1))
    assert (reply.body.result.identity.seq, ended) == (1, EndStream(STREAM))


def test_a_caller_that_waits_for_nothing_ends_at_once():
    assert opened().requests_ended(STREAM) == [EndStream(STREAM)]
    assert attached().requests_ended(7) == [EndStream(7)]


def test_drain_is_announced_and_plans_still_run():
    protocol = opened()
    assert protocol.drain_requested("rollout") == [Reply(STREAM, DrainAnswer("rollout"))]
    assert protocol.drain_requested("again") == []
    assert [type(action) for action in protocol.plan_received(STREAM, plan(1))] == [Execute]
    (refusal,) = protocol.attach_requested(5, attach_call(9, 9))
    assert isinstance(refusal.error, Draining)
    protocol.plan_finished(result(1))
    assert protocol.stream_opened(7, opening(stream_number=2))[1:] == [
        Reply(7, OpenedAnswer(2)),
        Reply(7, DrainAnswer("rollout")),
    ]


def test_stop_finishes_the_running_plan_and_drops_the_rest():
    protocol = opened(window=2)
    protocol.plan_received(STREAM, plan(1))
    protocol.plan_received(STREAM, plan(2))
    assert protocol.stop_requested("leaving") == [Reply(STREAM, DrainAnswer("leaving"))]
    assert protocol.plan_received(STREAM, plan(3)) == []
    reply, ended, stopped = protocol.plan_finished(result(1))
    assert reply.body.result.identity.seq == 1
    assert (ended.stream, type(ended.error), stopped) == (STREAM, Draining, Stopped())
    assert protocol.stop_requested("again") == []


def test_stop_on_an_idle_device_is_immediate():
    assert WorkerProtocol(worker_info()).stop_requested("leaving") == [Stopped()]


def test_stop_during_a_reset_refuses_the_attach_and_waits_for_the_device():
    protocol = WorkerProtocol(worker_info())
    protocol.attach_requested(1, attach_call())
    (refusal,) = protocol.stop_requested("leaving")
    assert (refusal.call, type(refusal.error)) == (1, Draining)
    assert protocol.executor_reset() == [Stopped()]
    (late,) = protocol.attach_requested(2, attach_call())
    assert isinstance(late, RefuseAttach)


def test_stop_with_an_outdated_plan_waits_for_it():
    protocol = opened()
    protocol.plan_received(STREAM, plan(1))
    protocol.attach_requested(2, attach_call(2, 1))
    protocol.stop_requested("leaving")
    assert protocol.plan_finished(result(1)) == [Stopped()]


def test_a_device_fault_answers_everyone_and_nothing_follows():
    protocol = opened()
    protocol.plan_received(STREAM, plan(1))
    fault = DeviceFault("gone")
    assert protocol.device_failed(fault) == [EndStream(STREAM, fault), Stopped()]
    assert protocol.stream_opened(7, opening(stream_number=2)) == [EndStream(7, fault)]
    assert protocol.attach_requested(5, attach_call(9, 9)) == [RefuseAttach(5, fault)]


def test_a_device_fault_during_a_reset_refuses_the_attach():
    protocol = WorkerProtocol(worker_info())
    protocol.attach_requested(1, attach_call())
    fault = DeviceFault("gone")
    assert protocol.device_failed(fault) == [RefuseAttach(1, fault), Stopped()]


# --- plans whose base is gone


def baseless(seq):
    return ArrivedPlan(identity(seq), MissingBase())


def test_a_plan_without_its_base_consumes_no_seq_and_those_behind_it_are_dropped():
    protocol = opened(window=3)
    protocol.plan_received(STREAM, plan(1))
    assert protocol.plan_received(STREAM, baseless(2)) == [Reply(STREAM, NeedFullAnswer(2))]
    assert protocol.plan_received(STREAM, plan(3)) == []
    assert protocol.plan_received(STREAM, baseless(3)) == []
    assert [type(action) for action in protocol.plan_finished(result(1))] == [Reply]
    assert [type(action) for action in protocol.plan_received(STREAM, plan(2))] == [Execute]
    assert protocol.plan_received(STREAM, plan(3)) == []
    assert [type(action) for action in protocol.plan_finished(result(2))] == [Reply, Execute]


def test_a_plan_of_a_place_that_is_taken_needs_no_base():
    protocol = opened(window=2)
    protocol.plan_received(STREAM, plan(1))
    assert protocol.plan_received(STREAM, baseless(1)) == []
    protocol.plan_finished(result(1))
    (kept,) = protocol.plan_received(STREAM, baseless(1))
    assert kept.body.result.identity.seq == 1


def test_a_plan_too_early_is_a_gap_with_or_without_its_base():
    protocol = opened(window=2)
    assert protocol.plan_received(STREAM, baseless(2)) == [Reply(STREAM, SequenceGapAnswer(1, 2))]


def test_a_reopened_stream_forgets_that_a_full_plan_is_expected():
    protocol = opened(window=2)
    protocol.plan_received(STREAM, baseless(1))
    protocol.stream_opened(STREAM + 1, opening(stream_number=2))
    assert protocol.plan_received(STREAM + 1, plan(2)) == [Reply(STREAM + 1, SequenceGapAnswer(1, 2))]


# --- what comes next


def test_what_follows_is_what_the_end_of_the_running_plan_will_give():
    protocol = opened(window=2)
    assert protocol.following is None
    protocol.plan_received(STREAM, plan(1))
    assert protocol.following is None
    protocol.plan_received(STREAM, plan(2))
    following = protocol.following
    assert protocol.plan_finished(result(1))[-1].plan is following.plan
    assert protocol.following is None


def test_nothing_follows_a_refused_plan_an_outdated_one_or_the_last_one():
    protocol = opened(window=2)
    protocol.plan_received(STREAM, plan(1))
    protocol.plan_received(STREAM, rejected(2))
    assert protocol.following is None
    protocol = opened(window=2)
    protocol.plan_received(STREAM, plan(1))
    protocol.plan_received(STREAM, plan(2))
    protocol.attach_requested(2, attach_call(2, 1))
    assert protocol.following is None
    protocol = opened(window=2)
    protocol.plan_received(STREAM, plan(1))
    protocol.plan_received(STREAM, plan(2))
    protocol.stop_requested("leaving")
    assert protocol.following is None
