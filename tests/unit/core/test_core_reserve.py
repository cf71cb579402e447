import pytest

from scheduler_svc.core.policy import FirstComeFirstServed
from scheduler_svc.core.request import Request, new_request
from scheduler_svc.core.reserve import choose_victim, decay_ratio, raise_ratio, reserve_target
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.waiting_queue import WaitingQueue
from tests.support.core_harness import make_spec


def make_request(handle: int, *, outputs: int = 0, prompt: int = 5, max_tokens: int = 100) -> Request:
    request = new_request(make_spec(handle, prompt=prompt, max_tokens=max_tokens), handle, now=0.0)
    request.tokens.extend(range(outputs))
    return request


def test_the_victim_has_the_fewest_outputs_then_is_the_youngest():
    requests = [make_request(1, outputs=9), make_request(2, outputs=3), make_request(3, outputs=2)]
    requests.append(make_request(4, outputs=2))

    assert choose_victim(requests) is requests[3]
    assert choose_victim(requests[:3]) is requests[2]


def test_the_oldest_is_never_the_victim():
    oldest, other = make_request(1), make_request(2, outputs=50)

    assert choose_victim([other, oldest]) is other
    assert choose_victim([oldest]) is None


def test_a_paused_request_is_the_victim_before_others_and_protected_by_no_age():
    paused, oldest, young = make_request(1, outputs=90), make_request(2), make_request(3)
    paused.standing.is_paused = True

    assert choose_victim([paused, oldest, young]) is paused
    assert choose_victim([paused, oldest]) is paused
    assert choose_victim([paused]) is None


@pytest.mark.parametrize(
    ("ratio", "outputs", "target"),
    [(0.5, 0, 5 + 50), (0.0, 0, 6), (1.0, 0, 104), (0.5, 99, 104), (0.5, 98, 104), (0.1, 90, 96)],
)
def test_the_reserve_is_a_share_of_what_may_come(ratio, outputs, target):
    assert reserve_target(make_request(1, outputs=outputs), ratio, CoreSettings()) == target


def test_the_reserve_is_clipped():
    request = make_request(1, max_tokens=100_000)

    assert reserve_target(request, 0.5, CoreSettings(reserve_clip_tokens=100)) == 55


def test_the_ratio_falls_to_its_floor_over_the_decay_steps():
    state = SchedulerState.create(CoreSettings(new_token_ratio_decay_steps=10))
    for _ in range(5):
        decay_ratio(state)
    assert state.new_token_ratio == pytest.approx(0.4)
    for _ in range(20):
        decay_ratio(state)
    assert state.new_token_ratio == 0.1


def test_a_retraction_raises_the_ratio_to_what_was_used():
    state = SchedulerState.create(CoreSettings(new_token_ratio_start=0.1))

    raise_ratio(state, [make_request(1, outputs=79)])
    assert state.new_token_ratio == pytest.approx(99 / 101)
    raise_ratio(state, [make_request(2)])
    assert state.new_token_ratio == pytest.approx(99 / 101)
    raise_ratio(state, [make_request(3, outputs=100)])
    assert state.new_token_ratio == 1.0


def test_the_queue_keeps_returning_requests_in_front_and_counts_tokens():
    queue = WaitingQueue(FirstComeFirstServed())
    requests = {handle: make_request(handle, outputs=handle) for handle in (1, 2, 3, 4)}
    queue.append(requests[3])
    queue.append(requests[4])
    queue.put_back(requests[2])
    queue.put_back(requests[1])

    assert [request.handle for request in queue] == [1, 2, 3, 4]
    assert (len(queue), queue.tokens) == (4, 30)
    queue.remove(requests[3])
    queue.remove(requests[1])
    assert [request.handle for request in queue] == [2, 4]
    assert queue.tokens == 16
