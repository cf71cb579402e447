import pytest

from scheduler_svc.links.liveness import Liveness, LivenessLimits


def make() -> Liveness:
    return Liveness(LivenessLimits(report_late_s=1.0, report_lost_s=2.75, plan_timeout_s=60.0), now=0.0)


def report(liveness, now, counter=1, capture_budget_s=0.0, device_seq=0):
    liveness.reported(counter=counter, device_seq=device_seq, capture_budget_s=capture_budget_s, now=now)


def test_an_idle_worker_lives_as_long_as_it_reports():
    liveness = make()
    for quarter in range(4000):
        report(liveness, now=quarter / 4)
        assert liveness.verdict(quarter / 4 + 0.2) is None


def test_a_worker_without_reports_is_lost():
    liveness = make()
    report(liveness, now=1.0)
    assert liveness.next_check(1.0) == 2.0
    assert not liveness.is_doubtful(1.99)
    assert liveness.is_doubtful(2.0)
    assert liveness.next_check(2.0) == 3.75
    assert liveness.verdict(3.74) is None
    assert liveness.verdict(3.75).field == "report"


def test_a_device_that_stands_still_beyond_the_budget_is_lost():
    liveness = make()
    liveness.plan_sent(1, budget_s=5.0, now=10.0)
    report(liveness, now=14.9, counter=-1)
    assert liveness.verdict(14.9) is None
    assert liveness.verdict(15.0).field == "device_counter"


def test_a_counter_that_moves_is_progress():
    liveness = make()
    liveness.plan_sent(1, budget_s=5.0, now=10.0)
    report(liveness, now=14.0, counter=7)
    assert liveness.verdict(16.0) is None
    assert liveness.next_check(16.0) == min(14.0 + 2.75, 14.0 + 5.0, 14.0 + 5.0 / 2)


def test_a_plan_that_waits_behind_another_has_its_budget_from_that_ones_result():
    liveness = make()
    liveness.plan_sent(1, budget_s=5.0, now=10.0)
    liveness.plan_sent(2, budget_s=3.0, now=10.0)
    liveness.plan_answered(1, now=14.0)
    report(liveness, now=16.9, counter=-1)
    assert liveness.verdict(16.9) is None
    assert liveness.verdict(17.0).field == "device_counter"


@pytest.mark.parametrize(("budget_s", "lost_at"), [(0.0, 60.0), (2.0, 2.0)])
def test_a_plan_without_budget_has_the_default(budget_s, lost_at):
    liveness = make()
    liveness.plan_sent(1, budget_s=budget_s, now=0.0)
    report(liveness, now=lost_at - 0.1, counter=-1)
    assert liveness.verdict(lost_at - 0.1) is None
    assert liveness.verdict(lost_at) is not None


def test_a_capture_adds_its_announced_budget():
    liveness = make()
    liveness.plan_sent(1, budget_s=2.0, now=0.0)
    report(liveness, now=1.0, counter=-1, capture_budget_s=4.0)
    report(liveness, now=3.0, counter=-1, capture_budget_s=4.0)
    assert liveness.verdict(5.5) is None


def test_a_stall_of_this_process_is_forgiven():
    liveness = make()
    liveness.plan_sent(1, budget_s=2.0, now=0.0)
    liveness.forgive(100.0)
    assert liveness.verdict(101.0) is None
    assert liveness.verdict(102.0) is not None


def test_a_device_that_needs_half_of_its_budget_is_doubtful():
    liveness = make()
    liveness.plan_sent(1, budget_s=6.0, now=0.0)
    report(liveness, now=2.9, counter=-1)
    assert not liveness.is_doubtful(2.99)
    assert liveness.is_doubtful(3.0)
    liveness.plan_answered(1, now=3.1)
    assert not liveness.is_doubtful(3.1)


def test_a_device_that_is_done_or_has_nothing_is_not_given_up_while_the_stream_is_broken():
    """Its results wait for a stream, as plans do that it has not got."""
    liveness = make()
    liveness.plan_sent(1, budget_s=2.0, now=0.0)
    liveness.plan_sent(2, budget_s=2.0, now=0.0)
    liveness.stream_broke()
    report(liveness, now=1.9)
    assert liveness.verdict(4.0) is None
    assert not liveness.is_doubtful(2.8)
    liveness.stream_reopened(4.0, is_new_to_worker=False)
    report(liveness, now=4.0)
    assert liveness.verdict(4.4) is None
    assert liveness.verdict(4.5).field == "device_counter", "the result of a finished plan follows at once"


def test_a_plan_that_a_new_stream_carried_to_the_worker_gets_all_of_its_time():
    liveness = make()
    liveness.plan_sent(1, budget_s=2.0, now=0.0)
    liveness.stream_broke()
    liveness.stream_reopened(1.9, is_new_to_worker=True)
    report(liveness, now=3.0, counter=-1)
    assert liveness.verdict(3.8) is None
    assert liveness.verdict(3.9).field == "device_counter"


def test_a_device_that_hangs_gains_no_time_from_broken_streams():
    liveness = make()
    liveness.plan_sent(1, budget_s=2.0, now=0.0)
    report(liveness, now=0.0, device_seq=1)
    liveness.stream_broke()
    report(liveness, now=1.5, device_seq=1)
    liveness.stream_reopened(1.6, is_new_to_worker=False)
    assert liveness.verdict(1.9) is None
    liveness.stream_broke()
    assert liveness.verdict(2.0).field == "device_counter"
