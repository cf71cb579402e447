from collections import Counter

import pytest

from protos.wire.enums import FinishReason
from scheduler_svc.core.cost_model import PlanShape
from scheduler_svc.core.events import ReaderPaused, ReaderResumed, StreamKey
from scheduler_svc.core.fair_share import FairShares
from scheduler_svc.core.policy import ByPriority, FirstComeFirstServed, LongestPrefixMatch, QueueView, make_policy
from scheduler_svc.core.queue_hint import forecast
from scheduler_svc.core.request import Request, RequestStatus, new_request
from scheduler_svc.core.settings import CoreSettings, PolicyKind
from scheduler_svc.core.waiting_queue import WaitingQueue
from tests.support.core_harness import CoreHarness, make_spec, oracle, small_info


def make_request(handle: int, *, now: float = 0.0, **changes: object) -> Request:
    return new_request(make_spec(handle, **changes), handle, now=now)


def order(queue: WaitingQueue, *, now: float = 0.0, cached: dict[int, int] | None = None) -> list[int]:
    view = QueueView(now, lambda request: (cached or {}).get(request.handle, 0), lambda _: 10)
    return [request.handle for request in queue.in_order(view)]


def first_plans(harness: CoreHarness) -> list[int]:
    """Handles in order of their first row."""
    return list(dict.fromkeys(handle for _, plan in harness.plans for handle in plan.rows.handles.tolist()))


def make_harness(*, budget_tokens: int = 64, **changes: object) -> CoreHarness:
    settings = CoreSettings(budget_tokens=budget_tokens, **changes)
    return CoreHarness(settings)


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        (PolicyKind.FCFS, FirstComeFirstServed),
        (PolicyKind.LPM, LongestPrefixMatch),
        (PolicyKind.PRIORITY, ByPriority),
    ],
)
def test_every_kind_has_a_policy(kind, policy):
    assert type(make_policy(CoreSettings(schedule_policy=kind))) is policy


def test_lpm_takes_the_most_cached_first_but_nobody_waits_for_ever():
    queue = WaitingQueue(LongestPrefixMatch())
    for handle, now in ((1, 0.0), (2, 5.0), (3, 5.0), (4, 5.0)):
        queue.append(make_request(handle, now=now))
    queue.put_back(make_request(5, now=5.0))
    cached = {2: 4, 3: 8, 4: 8}

    assert order(queue, now=6.0, cached=cached) == [5, 3, 4, 2, 1]
    assert order(queue, now=10.0, cached=cached) == [5, 1, 3, 4, 2]


def test_lpm_does_not_look_into_a_long_queue():
    queue = WaitingQueue(LongestPrefixMatch())
    for handle in range(1, 130):
        queue.append(make_request(handle))

    assert order(queue, cached={129: 100}) == list(range(1, 130))


def test_priority_ages():
    queue = WaitingQueue(ByPriority(aging_s=10))
    for handle, now, priority in ((1, 0.0, 0), (2, 5.0, 1), (3, 25.0, 2), (4, 0.0, -1)):
        queue.append(make_request(handle, now=now, priority=priority))

    assert order(queue) == [2, 1, 3, 4]


def test_a_higher_priority_is_placed_before_older_ones():
    harness = make_harness(schedule_policy=PolicyKind.PRIORITY)
    harness.attach(info=small_info(max_rows=1))
    harness.submit(make_spec(1), make_spec(2), make_spec(3, priority=1))
    harness.run()

    assert first_plans(harness) == [3, 1, 2]


def test_domains_get_equal_shares_however_many_requests_they_have():
    harness = make_harness()
    harness.attach(info=small_info(max_rows=1))
    busy = [make_spec(stream, isolation_domain=b"busy") for stream in range(1, 11)]
    quiet = [make_spec(stream, isolation_domain=b"quiet") for stream in (11, 12)]
    harness.submit(*busy, *quiet)
    harness.run()

    places = [handle for handle in first_plans(harness) if handle >= 11]
    assert places == [11, 12]
    assert max(first_plans(harness).index(handle) for handle in places) <= 4
    assert all(harness.output(spec.stream.stream_id) for spec in busy)


def test_a_share_of_three_gets_three_times_the_tokens_and_salts_make_no_second_share():
    shares = FairShares()
    heavy = [
        make_request(handle, isolation_domain=bytes([handle]), share_domain=b"heavy", share=3.0)
        for handle in range(1, 13)
    ]
    light = [make_request(handle, share_domain=b"light") for handle in range(13, 25)]
    assert {request.spec.fair_domain for request in heavy} == {b"heavy"}
    for domain in (b"heavy", b"light"):
        shares.enter(domain)

    order = list(shares.merge({b"heavy": heavy, b"light": light}, lambda request: 10))

    first = [request.spec.fair_domain for request in order[:12]]
    assert (first.count(b"heavy"), first.count(b"light")) == (9, 3)


def test_shares_count_tokens_and_not_requests():
    harness = make_harness()
    harness.attach(info=small_info(max_rows=1, num_pages=200))
    long = [make_spec(stream, prompt=60, isolation_domain=b"long") for stream in range(1, 9)]
    short = [make_spec(stream, prompt=6, isolation_domain=b"short") for stream in range(11, 31)]
    harness.submit(*long, *short)
    harness.run()

    given = Counter("long" if handle <= 8 else "short" for handle in first_plans(harness)[:12])
    assert given["short"] >= 3 * given["long"]
    assert given["long"] >= 1


def test_a_domain_does_not_save_up_while_it_asks_for_nothing():
    shares = FairShares()
    shares.enter(b"a")
    shares.charge(b"a", 1000)
    shares.charge(b"a", 1000)
    shares.enter(b"late")
    queues = {
        b"a": [make_request(handle, isolation_domain=b"a") for handle in (1, 2)],
        b"late": [make_request(handle, isolation_domain=b"late") for handle in (3, 4, 5)],
    }
    merged = [request.handle for request in shares.merge(queues, lambda _: 600)]

    assert merged[:2] == [3, 4]
    assert merged.index(1) < merged.index(5)


def test_a_domain_keeps_its_count_when_nothing_of_it_waits_for_an_instant():
    """Else one that asks one by one would always go first."""
    harness = make_harness()
    harness.attach(info=small_info(max_rows=1))
    harness.submit(*[make_spec(stream, isolation_domain=b"many") for stream in range(1, 9)])
    for stream in range(11, 31):
        harness.submit(make_spec(stream, isolation_domain=b"one by one"))
        while StreamKey(0, stream) not in harness.ends and harness.end(8) is None:
            harness.deliver()

    places = first_plans(harness)
    assert places[:12] == [1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14]


def test_counts_of_domains_that_left_are_forgotten_when_they_matter_no_more():
    shares = FairShares()
    for name in range(5000):
        shares.enter(b"%d" % name)
        shares.charge(b"%d" % name, 10 + name)
        shares.leave(b"%d" % name)
    assert len(shares._left) <= 4096
    shares.enter(b"4999")
    shares.enter(b"new")
    assert shares._given == {b"4999": 5009.0, b"new": 0.0}


def pause_all(harness: CoreHarness, *stream_ids: int) -> None:
    harness.step(*[ReaderPaused(make_spec(stream).stream) for stream in stream_ids])


def resume_all(harness: CoreHarness, *stream_ids: int) -> None:
    harness.step(*[ReaderResumed(make_spec(stream).stream) for stream in stream_ids])


@pytest.mark.parametrize("delivered", [0, 1, 3])
def test_a_paused_request_is_in_no_later_plan_and_goes_on_when_resumed(delivered):
    harness = make_harness(budget_tokens=4)
    harness.attach(info=small_info(window=2))
    harness.submit(make_spec(1, prompt=9, max_tokens=6), make_spec(2, max_tokens=6))
    for _ in range(delivered):
        harness.deliver()
    pause_all(harness, 1, 77)
    before = len(harness.plans)
    harness.run()

    assert all(1 not in plan.rows.handles for _, plan in harness.plans[before:])
    assert isinstance(harness.output(2), list)
    resume_all(harness, 1, 77)
    harness.run()
    assert [harness.output(stream) for stream in (1, 2)] == [
        oracle(harness.infos["w0"], spec) for spec in harness.specs.values()
    ]
    harness.assert_balanced()


def test_a_paused_request_gives_its_pages_to_those_who_wait():
    harness = make_harness()
    harness.attach(info=small_info(num_pages=9))
    harness.submit(make_spec(1, prompt=20, max_tokens=12))
    harness.deliver()
    harness.submit(make_spec(2, prompt=28, max_tokens=4))
    assert harness.state.gauges().waiting == 1
    pause_all(harness, 1)
    harness.run()

    assert len(harness.output(2)) == 4
    assert harness.state.streams[make_spec(1).stream].status is RequestStatus.WAITING
    resume_all(harness, 1)
    harness.run()
    assert harness.output(1) == oracle(harness.infos["w0"], harness.specs[make_spec(1).stream])
    harness.assert_balanced()


def test_a_paused_request_gives_its_row_to_those_who_wait():
    harness = make_harness()
    harness.attach(info=small_info(max_rows=1))
    harness.submit(make_spec(1, max_tokens=9), make_spec(2))
    harness.deliver()
    pause_all(harness, 1)
    harness.run()

    assert len(harness.output(2)) == 4


def test_a_paused_request_has_lost_its_seniority():
    """Under memory pressure the other one is the oldest now."""
    harness = make_harness(new_token_ratio_start=0.0, new_token_ratio_floor=0.0)
    harness.attach(info=small_info(num_pages=7))
    harness.submit(make_spec(1, prompt=4, max_tokens=16), make_spec(2, prompt=4, max_tokens=16))
    pause_all(harness, 1)
    resume_all(harness, 1)
    harness.run()

    attempts: dict[int, set[int]] = {1: set(), 2: set()}
    for _, plan in harness.plans:
        for handle, attempt in zip(plan.rows.handles.tolist(), plan.rows.attempts.tolist(), strict=True):
            attempts[handle].add(attempt)
    assert attempts[2] == {0}
    assert len(attempts[1]) > 1


def test_one_who_waits_for_a_paused_ones_prefix_waits_no_more():
    harness = make_harness(budget_tokens=8)
    harness.attach()
    shared = [3 * index for index in range(24)]
    harness.submit(make_spec(1, prompt=shared), make_spec(2, prompt=[*shared, 1]))
    harness.deliver()
    pause_all(harness, 1)
    harness.run()

    assert len(harness.output(2)) == 4


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.STOP])
def test_a_paused_request_can_be_cancelled(reason):
    harness = make_harness()
    harness.attach()
    harness.submit(make_spec(1))
    pause_all(harness, 1)
    harness.cancel(1, reason)
    harness.run()

    harness.assert_balanced()


def test_a_domain_does_not_save_up_while_its_reader_has_fallen_behind():
    harness = make_harness()
    harness.attach(info=small_info(max_rows=1))
    slow = [make_spec(stream, isolation_domain=b"slow") for stream in range(1, 7)]
    busy = [make_spec(stream, isolation_domain=b"busy") for stream in range(11, 21)]
    harness.submit(busy[0], *slow, *busy[1:5])
    pause_all(harness, *range(1, 7))
    while harness.end(14) is None:
        harness.deliver()
    harness.submit(*busy[5:])
    resume_all(harness, *range(1, 7))
    harness.run()

    ends = [stream.stream_id for stream in harness.ends]
    assert [stream >= 11 for stream in ends[-10:]].count(True) == 5
    assert {stream >= 11 for stream in ends[5:9]} == {True, False}


@pytest.mark.parametrize("policy", [PolicyKind.FCFS, PolicyKind.LPM])
def test_a_priority_is_refused_by_name_where_the_policy_does_not_look_at_it(policy):
    harness = make_harness(schedule_policy=policy)
    harness.attach()
    harness.submit(make_spec(1, priority=-3), make_spec(2, priority=0))
    error = harness.end(1).error
    assert (error.reason, error.field) == ("UNSUPPORTED", "priority")
    assert f"priority is -3; this server schedules by {policy.value}" in error.message
    assert harness.end(2) is None


@pytest.mark.parametrize("policy", list(PolicyKind))
def test_a_request_that_was_paused_while_it_waited_is_behind_those_who_came_before_it_goes_on(policy):
    harness = make_harness(schedule_policy=policy)
    harness.attach(info=small_info(max_rows=1))
    harness.submit(*[make_spec(stream, prompt=[stream]) for stream in (1, 2)])
    harness.now = 4.0
    harness.submit(make_spec(3, prompt=[3]))
    harness.now = 5.0
    pause_all(harness, 2)
    harness.now = 20.0
    resume_all(harness, 2)
    harness.run()

    assert first_plans(harness) == [1, 3, 2]


def test_paused_requests_are_not_ahead_of_one_that_comes():
    harness = make_harness()
    harness.attach(info=small_info(max_rows=1))
    for tokens in range(1, 21):
        harness.state.workers["w0"].measured(PlanShape(tokens, 100), 0.01 * tokens)
    harness.submit(*[make_spec(stream, max_tokens=10) for stream in range(1, 4)], make_spec(20, prompt=200))

    def wait_s() -> float:
        expected = forecast(harness.state, make_spec(30))
        assert expected is not None
        return expected.wait_s

    whole = wait_s()
    pause_all(harness, 20)
    assert 0 < 3 * wait_s() < whole
    harness.submit(make_spec(30, deadline_s=harness.now + 2 * whole))
    assert harness.end(30) is None
    resume_all(harness, 20)
    assert wait_s() > whole
