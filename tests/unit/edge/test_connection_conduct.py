"""S17: which connections are judged by what they waste."""

from scheduler_svc.edge.connection_conduct import (
    HALF_LIFE_S,
    JUDGED_S,
    MAX_WASTED,
    WATCHED_S,
    WATCHED_SHARE,
    ConnectionConduct,
    Standing,
)

ONE, TWO, ELSEWHERE = "ipv4:10.0.0.1:5000", "ipv4:10.0.0.1:5001", "ipv6:%5B::1%5D:5000"
LIMIT = int(MAX_WASTED)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def conduct_at(clock: Clock, *, can_close: bool = True) -> ConnectionConduct:
    return ConnectionConduct(clock, lambda _: can_close)


def wasted(conduct: ConnectionConduct, peer: str, count: int) -> list[bool]:
    return [conduct.wasted(peer) for _ in range(count)]


def test_one_too_many_is_said_once_and_judges_that_connection_alone():
    conduct = conduct_at(Clock())
    assert wasted(conduct, ONE, LIMIT + 3) == [False] * LIMIT + [True, False, False]
    assert conduct.standing(ONE) is Standing.CLOSED
    assert conduct.standing(TWO) is Standing.FINE


def test_the_name_of_a_judged_connection_is_free_for_another_one_soon():
    clock = Clock()
    conduct = conduct_at(clock, can_close=False)
    wasted(conduct, ONE, LIMIT + 1)
    assert conduct.standing(ONE) is Standing.JUDGED
    clock.now += JUDGED_S
    assert conduct.standing(ONE) is Standing.FINE


def test_half_of_good_calls_keeps_a_connection_from_being_judged():
    conduct = conduct_at(Clock())
    conduct.wasted(ONE)
    conduct.good(ONE)
    for _ in range(10 * LIMIT):
        conduct.good(ONE)
        assert not conduct.wasted(ONE)


def test_wasted_calls_are_forgotten_so_that_a_slow_rate_is_never_judged():
    clock = Clock()
    conduct = conduct_at(clock)
    for _ in range(10 * LIMIT):
        clock.now += HALF_LIFE_S / LIMIT * 2
        assert not conduct.wasted(ONE)


def test_weights_count_as_so_many_calls():
    conduct = conduct_at(Clock())
    assert not conduct.wasted(ONE, weight=MAX_WASTED)
    assert conduct.wasted(ONE)


def test_new_connections_of_a_judged_ones_address_have_less_for_a_while():
    clock = Clock()
    conduct = conduct_at(clock)
    wasted(conduct, ONE, LIMIT + 1)
    few = int(LIMIT * WATCHED_SHARE)
    assert wasted(conduct, TWO, few + 1) == [False] * few + [True]
    assert True not in wasted(conduct, ELSEWHERE, LIMIT)
    clock.now += WATCHED_S + 1
    assert True not in wasted(conduct, "ipv4:10.0.0.1:5002", LIMIT)


def test_connections_without_wasted_calls_are_not_kept():
    conduct = conduct_at(Clock())
    for port in range(10_000):
        conduct.good(f"ipv4:10.0.0.1:{port}")
        conduct.wasted(f"ipv4:10.0.0.2:{port}")
    assert len(conduct._accounts) == 4096
