"""Bytes of running requests: capped for each known caller and for the process, given back whatever ends a stream."""

import pytest

from protos.wire.errors import QueueFull, QuotaExceeded
from scheduler_svc.edge.caller_identity import ANONYMOUS, CallerIdentity
from scheduler_svc.edge.held_bytes import HeldBytes

A, B, C = (CallerIdentity(name) for name in "abc")


def held():
    return HeldBytes(max_bytes=100, max_bytes_per_caller=60)


def test_a_caller_at_its_cap_is_refused_and_others_are_not():
    made = held()
    made.take(1, A, 60)
    with pytest.raises(QuotaExceeded):
        made.take(2, A, 1)
    made.take(2, B, 40)
    assert (made.total, made.most_of_one_caller) == (100, 60)
    with pytest.raises(QueueFull):
        made.take(3, C, 1)
    assert (made.total, made.most_of_one_caller) == (100, 60), "what is refused is not counted"


def test_what_is_given_back_makes_room():
    made = held()
    made.take(1, A, 60)
    made.give_back(1)
    assert (made.total, made.most_of_one_caller) == (0, 0)
    made.take(2, A, 60)


def test_everybody_together_has_the_cap_of_the_process():
    made = held()
    made.take(1, ANONYMOUS, 100)
    with pytest.raises(QueueFull):
        made.take(2, ANONYMOUS, 1)
