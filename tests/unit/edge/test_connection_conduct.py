"""S17: which connections are judged by what they waste."""

from scheduler_svc.edge.connection_conduct import HALF_LIFE_S, MAX_WASTED, WATCHED_S, WATCHED_SHARE, ConnectionConduct

ONE, TWO, ELSEWHERE = "ipv4:10.0.0.1:5000", "ipv4:10.0.0.1:5001", "ipv6:%5B::1%5D:5000"
LIMIT = int(MAX_WASTED)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def wasted(conduct: ConnectionConduct, peer: str, count: int) -> list[bool]:
    return [conduct.wasted(peer) for _ in range(count)]


def test_one_too_many_is_said_once_and_judges_that_connection_alone():
    conduct = ConnectionConduct(Clock())
    assert wasted(conduct, ONE, LIMIT + 3) == [False] * LIMIT + [True, False, False]
    assert conduct.is_judged(ONE)
    assert not conduct.is_judged(TWO)


def test_half_of_good_calls_keeps_a_connection_from_being_judged():
    conduct = ConnectionConduct(Clock())
    conduct.wasted(ONE)
    conduct.good(ONE)
    for _ in range(10 * LIMIT):
        conduct.good(ONE)
        assert not conduct.wasted(ONE)


def test_wasted_calls_are_forgotten_so_that_a_slow_rate_is_never_judged():
    clock = Clock()
    conduct = ConnectionConduct(clock)
    for _ in range(10 * LIMIT):
        clock.now += HALF_LIFE_S / LIMIT * 2
        assert not conduct.wasted(ONE)


def test_weights_count_as_so_many_calls():
    conduct = ConnectionConduct(Clock())
    assert not conduct.wasted(ONE, weight=MAX_WASTED)
    assert conduct.wasted(ONE)


def test_new_connections_of_a_judged_ones_address_have_less_for_a_while():
    clock = Clock()
    conduct = ConnectionConduct(clock)
    wasted(conduct, ONE, LIMIT + 1)
    few = int(LIMIT * WATCHED_SHARE)
    assert wasted(conduct, TWO, few + 1) == [False] * few + [True]
    assert True not in wasted(conduct, ELSEWHERE, LIMIT)
    clock.now += WATCHED_S + 1
    assert True not in wasted(conduct, "ipv4:10.0.0.1:5002", LIMIT)


def test_connections_without_wasted_calls_are_not_kept():
    conduct = ConnectionConduct(Clock())
    for port in range(10_000):
        conduct.good(f"ipv4:10.0.0.1:{port}")
        conduct.wasted(f"ipv4:10.0.0.2:{port}")
    assert len(conduct._accounts) == 4096
