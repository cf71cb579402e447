"""What becomes of the bytes of a plan before ordering: a plan, a refusal with its place, or the end of the stream."""

import itertools

import pytest

from protos.forwardplane.v1.worker_pb2 import PlanMessage
from protos.wire.codec import checksum, encode_plan
from protos.wire.errors import DataFault, UnsupportedFeature
from protos.wire.plan import ForwardPlan
from protos.wire.result import PlanRejection
from tests.support.plans import extend, make_identity, make_info, make_limits, make_plan, with_element, with_value
from worker_svc.rpc.plan_intake import PlanIntake

UNSUPPORTED_SEQ = 99


def intake(**changes):
    ticks = itertools.count(100, 10)
    return PlanIntake(make_info(limits=make_limits(**changes)), lambda: next(ticks), stage)


def stage(plan, digest=None):
    if plan.identity.seq == UNSUPPORTED_SEQ:
        raise UnsupportedFeature("not here", field="forwards.mode")
    return lambda: ("ran", plan.identity.seq)


def message(plan):
    body = encode_plan(plan)
    return PlanMessage(body=body, crc32=checksum(body))


def test_a_valid_plan_comes_with_the_times_of_its_reading():
    arrived = intake().read(message(make_plan([extend(0, 5)], seq=4)))
    assert isinstance(arrived.content, ForwardPlan)
    assert arrived.identity == make_identity(seq=4)
    times = arrived.times
    assert (times.receive_ns, times.parse_ns, times.parsed_at_ns) == (10, 10, 120)
    assert arrived.run() == ("ran", 4)


def test_a_plan_that_cannot_be_staged_is_refused_in_its_place():
    arrived = intake().read(message(make_plan([extend(0, 5)], seq=UNSUPPORTED_SEQ)))
    assert (arrived.identity.seq, arrived.content.field, arrived.run) == (UNSUPPORTED_SEQ, "forwards.mode", None)


def test_an_invalid_plan_keeps_its_place_and_says_what_is_wrong():
    arrived = intake().read(message(with_element(make_plan([extend(0, 5)], seq=4), "tokens.ids", 2, 60_000)))
    assert arrived.identity == make_identity(seq=4)
    rejection = arrived.content
    assert isinstance(rejection, PlanRejection)
    assert (rejection.reason, rejection.field, rejection.row) == ("INVALID_PLAN", "tokens.ids", 0)


def test_malformed_columns_keep_their_place_too():
    plan = with_value(make_plan([extend(0, 5)], seq=4), "rows.attempts", make_plan([]).rows.attempts)
    arrived = intake().read(message(plan))
    assert (arrived.identity.seq, arrived.content.reason) == (4, "INVALID_PLAN")


def test_a_plan_over_the_byte_limit_is_refused_in_its_place():
    arrived = intake(max_plan_bytes=64).read(message(make_plan([extend(0, 5)], seq=4)))
    assert (arrived.identity.seq, arrived.content.field) == (4, "body")


def test_a_wrong_checksum_and_bytes_without_identity_are_data_faults():
    good = message(make_plan([extend(0, 5)]))
    junk = b"\xff\xff\xff"
    for bad in (PlanMessage(body=good.body, crc32=good.crc32 ^ 1), PlanMessage(body=junk, crc32=checksum(junk))):
        with pytest.raises(DataFault):
            intake().read(bad)
