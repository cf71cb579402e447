from dataclasses import replace

import pytest

from protos.wire.enums import FinishReason
from protos.wire.errors import InternalFault, UnsupportedFeature
from scheduler_svc.core.counters import MigrationCause
from scheduler_svc.core.events import RequestFinished, ResultReceived, SendPlan, WorkerAttached, WorkerLost
from scheduler_svc.core.request import RequestStatus, new_request
from scheduler_svc.core.scheduler import step, wake_at
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state import SchedulerState, check_invariants
from tests.support.core_harness import CoreHarness, make_spec, oracle, small_info


def make_harness(**changes: object) -> CoreHarness:
    harness = CoreHarness()
    harness.attach(info=small_info(**changes))
    return harness


def assert_right_output(harness: CoreHarness) -> None:
    for stream, spec in harness.specs.items():
        assert harness.outputs[stream] == oracle(harness.infos["w0"], spec)
    harness.assert_balanced()


def test_nothing_to_do_gives_no_instructions():
    harness = make_harness()

    assert harness.step() == []
    assert wake_at(harness.state) is None


@pytest.mark.parametrize("delivered", range(5))
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.STOP])
def test_a_cancelled_request_is_in_no_later_plan(window, delivered, reason):
    harness = make_harness(window=window)
    harness.submit(make_spec(1, prompt=70), make_spec(2, prompt=70), make_spec(3))
    for _ in range(delivered):
        harness.deliver()
    if harness.end(2) is not None:
        pytest.fail("the request ended before it could be cancelled")
    planned = len(harness.plans)

    harness.cancel(2, reason)
    harness.run()

    end = harness.end(2)
    assert isinstance(end, RequestFinished)
    assert end.reason is reason
    assert end.usage.output_tokens == len(harness.output(2))
    assert all(2 not in plan.rows.handles for _, plan in harness.plans[planned:])
    assert harness.output(3) == oracle(harness.infos["w0"], harness.specs[make_spec(3).stream])
    harness.assert_balanced()


def test_a_waiting_request_can_be_cancelled_and_unknown_streams_are_ignored():
    harness = make_harness(max_rows=1)
    harness.submit(make_spec(1), make_spec(2))

    harness.cancel(2)
    harness.cancel(2)
    harness.cancel(77)
    harness.run()

    assert harness.end(2).reason is FinishReason.ABORT
    assert harness.output(2) == []
    harness.assert_balanced()


def test_deadlines_end_running_and_waiting_requests():
    harness = make_harness(max_rows=1)
    harness.submit(make_spec(1, max_tokens=40, deadline_s=5), make_spec(2, deadline_s=3), make_spec(3))
    assert wake_at(harness.state) == 3

    harness.now = 3
    harness.step()
    assert harness.end(2).reason is FinishReason.DEADLINE
    assert wake_at(harness.state) == 5
    harness.deliver()
    harness.now = 6
    harness.step()

    assert harness.end(1).reason is FinishReason.DEADLINE
    assert harness.end(1).usage.output_tokens == 1
    harness.run()
    assert harness.end(3).reason is FinishReason.LENGTH
    assert wake_at(harness.state) is None
    harness.assert_balanced()


def test_deadlines_of_ended_requests_do_not_pile_up():
    harness = make_harness()
    for stream in range(300):
        harness.submit(make_spec(stream, max_tokens=1, deadline_s=1000 + stream))
        harness.run()

    assert len(harness.state.deadlines) < 100


@pytest.mark.parametrize("window", [1, 2])
def test_a_lost_workers_requests_go_on_elsewhere_with_the_same_tokens(window):
    harness = make_harness(window=window)
    harness.attach("w1")
    harness.submit(*[make_spec(stream, max_tokens=8) for stream in range(6)])
    harness.deliver("w0")
    harness.deliver("w1")
    late = harness.execute("w0")

    harness.lose("w0")
    harness.step(ResultReceived("w0", late))
    harness.run()

    assert harness.state.counters.migrations == 3
    assert harness.state.counters.late_results == 1
    assert_right_output(harness)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ({"died": True}, MigrationCause.WORKER_DIED),
        ({"drained": True}, MigrationCause.DRAIN),
        ({}, MigrationCause.WORKER_LOST),
    ],
)
def test_a_migration_is_counted_by_what_became_of_the_worker(how, cause):
    harness = make_harness()
    harness.submit(*[make_spec(stream, max_tokens=8) for stream in range(2)])
    harness.step(WorkerLost("w0", **how))

    assert harness.state.counters.migrations_by_cause == {**dict.fromkeys(MigrationCause, 0), cause: 2}


def test_a_lost_workers_requests_wait_for_its_return():
    harness = make_harness(window=2)
    harness.submit(make_spec(1, max_tokens=8), make_spec(2, max_tokens=8))
    harness.deliver()

    harness.lose()
    assert (harness.state.gauges().waiting, harness.state.gauges().running) == (2, 0)
    harness.attach()
    harness.run()

    assert_right_output(harness)


def test_attaching_again_without_a_loss_starts_from_empty_pages():
    harness = make_harness()
    harness.submit(make_spec(1, max_tokens=8))
    harness.deliver()

    harness.attach()
    harness.run()

    resumed = harness.plans[2][1]
    assert (resumed.identity.term, resumed.identity.seq) == (2, 1)
    assert resumed.rows.extend_lens.tolist() == [6]
    assert resumed.rows.attempts.tolist() == [1]
    assert_right_output(harness)


def test_an_unusable_worker_is_refused_before_anything_changes():
    state = SchedulerState.create(CoreSettings())

    with pytest.raises(UnsupportedFeature):
        step(state, [WorkerAttached("w0", replace(small_info(), sub_pools=()), 1, 1)], 0.0)
    assert not state.workers


def test_returning_requests_are_first_in_order_of_seniority():
    harness = make_harness(max_rows=3)
    harness.submit(*[make_spec(stream) for stream in range(1, 6)])
    harness.lose()
    assert [request.handle for request in harness.state.waiting] == [1, 2, 3, 4, 5]

    harness.attach(info=small_info(max_rows=2))

    assert harness.plans[-1][1].rows.handles.tolist() == [1, 2]
    harness.run()
    assert_right_output(harness)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_the_window_is_filled_and_never_passed(window):
    harness = make_harness(window=window)

    out = harness.submit(make_spec(1, max_tokens=20))

    assert sum(isinstance(instruction, SendPlan) for instruction in out) == window
    harness.run()
    assert_right_output(harness)


def test_plans_carry_identity_and_budget():
    harness = CoreHarness(CoreSettings(plan_budget_ms=1234))
    harness.attach()
    harness.submit(make_spec(1, max_tokens=2))
    harness.run()

    identities = [plan.identity for _, plan in harness.plans]
    assert [(identity.epoch, identity.term, identity.seq) for identity in identities] == [(1, 1, 1), (1, 1, 2)]
    assert {identity.budget_ms for identity in identities} == {1234}
    assert {identity.incarnation for identity in identities} == {harness.infos["w0"].incarnation}


def test_counters_and_gauges_tell_what_happened():
    harness = make_harness()
    harness.submit(make_spec(1, prompt=6, max_tokens=3), make_spec(2, prompt=2, max_tokens=3))

    gauges = harness.state.gauges()
    assert (gauges.running, gauges.waiting) == (2, 0)
    assert (gauges.workers[0].pages, gauges.workers[0].pages_used) == ((64,), (3,))
    harness.run()
    counters = harness.state.counters
    assert (counters.plans, counters.rows) == (3, 6)
    assert (counters.prefill_tokens, counters.decode_tokens) == (8, 4)
    assert (counters.prompt_tokens, counters.output_tokens) == (8, 6)
    assert harness.state.gauges().workers[0].pages_used == (0,)
    assert harness.state.new_token_ratio == pytest.approx(0.7 - 2 * 0.001)


def test_broken_state_is_noticed():
    harness = make_harness()
    harness.submit(make_spec(1), make_spec(2))
    worker = harness.state.workers["w0"]
    request = worker.running[1]

    request.kv_len += 1
    with pytest.raises(InternalFault, match="plans in flight continue one another"):
        check_invariants(harness.state)
    request.kv_len -= 1
    worker.memory.allocators[0].take(1)
    with pytest.raises(InternalFault, match="partition"):
        check_invariants(harness.state)


def test_an_illegal_transition_is_a_bug():
    request = new_request(make_spec(1), handle=1, now=0.0)

    with pytest.raises(AssertionError, match="WAITING -> RUNNING"):
        request.move_to(RequestStatus.RUNNING)
    request.move_to(RequestStatus.FINISHED)
    with pytest.raises(AssertionError, match="FINISHED -> WAITING"):
        request.move_to(RequestStatus.WAITING)
