import asyncio
import logging
from types import SimpleNamespace

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from protos.forwardplane.v1 import error_pb2
from protos.service.status import MAX_MESSAGE_BYTES, MAX_ROWS, abort_with, fault_border, from_rpc_error, to_status
from protos.wire import errors
from protos.wire.errors import EngineError

ALL_CLASSES = sorted(errors.error_classes().values(), key=lambda found: found.reason)


class Ended(grpc.RpcError):
    """What a client sees of a status."""

    def __init__(self, code, details="", metadata=()):
        self._code, self._details, self._metadata = code, details, metadata

    def code(self):
        return self._code

    def details(self):
        return self._details

    def trailing_metadata(self):
        return self._metadata


def over_the_wire(error):
    status = to_status(error)
    return Ended(status.code, status.details, status.trailing_metadata)


def details_of(error):
    ((_, body),) = to_status(error).trailing_metadata
    return {item.TypeName(): item for item in status_pb2.Status.FromString(body).details}


def test_every_reason_names_one_class():
    waiting, found = [EngineError], []
    while waiting:
        found.append(waiting.pop())
        waiting.extend(found[-1].__subclasses__())

    assert len({item.reason for item in found}) == len(found)
    assert set(ALL_CLASSES) == set(found)


@pytest.mark.parametrize("error_class", ALL_CLASSES, ids=lambda found: found.reason)
def test_every_class_has_known_constants_and_returns_as_itself(error_class):
    assert error_class.status in grpc.StatusCode.__members__
    assert error_class.retry in {"never", "resync", "later", "elsewhere"}
    assert error_class.blast in {"row", "plan", "worker"}

    back = from_rpc_error(over_the_wire(error_class("what is wrong")))

    assert type(back) is error_class
    assert back.message == "what is wrong"


def test_every_field_returns():
    sent = errors.InvalidPlan("kv_indices of row 3 is 9, limit 8", field="kv_indices", plan_seq=7, rows=(3, 4))
    sent.retry_after_ms = 1500
    sent.error_id = "ab12"

    back = from_rpc_error(over_the_wire(sent))

    assert vars(back) == vars(sent)


def test_no_plan_seq_is_not_plan_0():
    assert from_rpc_error(over_the_wire(errors.InvalidPlan("x"))).plan_seq is None
    assert from_rpc_error(over_the_wire(errors.InvalidPlan("x", plan_seq=0))).plan_seq == 0


def test_a_stale_epoch_returns_with_the_highest_pair():
    back = from_rpc_error(over_the_wire(errors.StaleEpoch("old", highest_epoch=2**40, highest_term=3)))

    assert (back.highest_epoch, back.highest_term) == (2**40, 3)


def test_standard_details_follow_the_status():
    invalid = details_of(errors.InvalidRequest("top_p is 0", field="top_p"))
    full = details_of(errors.QueueFull("queue is full", retry_after_ms=250))
    info, bad, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    invalid["google.rpc.ErrorInfo"].Unpack(info)
    invalid["google.rpc.BadRequest"].Unpack(bad)
    full["google.rpc.RetryInfo"].Unpack(retry)

    assert (info.reason, info.domain) == ("INVALID_REQUEST", "forwardplane")
    assert bad.field_violations[0].field == "top_p"
    assert retry.retry_delay.ToMilliseconds() == 250
    assert "google.rpc.BadRequest" not in full
    assert "google.rpc.RetryInfo" not in invalid


@pytest.mark.parametrize("message", ["", "a" * 3000, "\N{PILE OF POO}" * 1000, "\ud800 half a pair", "\0\n%"])
@pytest.mark.parametrize("rows", [(), tuple(range(2**32 - 4096, 2**32))])
def test_a_status_always_fits_into_trailers(message, rows):
    status = to_status(errors.InvalidPlan(message, field="f", rows=rows))

    assert len(status.details.encode()) <= MAX_MESSAGE_BYTES
    assert sum(len(value) for _, value in status.trailing_metadata) < 4096
    back = from_rpc_error(Ended(status.code, status.details, status.trailing_metadata))
    assert back.rows == rows[:MAX_ROWS]


UNAVAILABLE, EXHAUSTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
CANCELLED = grpc.StatusCode.CANCELLED


@pytest.mark.parametrize(
    ("code", "details", "expected", "message"),
    [
        (UNAVAILABLE, "... Connection refused (111)", errors.NoServer, "no server answers at h:1"),
        (UNAVAILABLE, "DNS resolution failed for h:1", errors.NoServer, "no server answers at h:1"),
        (UNAVAILABLE, "Socket closed", errors.ConnectionLost, "the connection to h:1 was lost"),
        (
            grpc.StatusCode.INTERNAL,
            "Internal error from Core",
            errors.ConnectionLost,
            "the connection to h:1 was lost",
        ),
        (
            EXHAUSTED,
            "Received message larger",
            errors.MessageTooLarge,
            "a message is over the byte cap of the transport",
        ),
        (
            EXHAUSTED,
            "CLIENT: Received message larger than max (5 vs. 4)",
            errors.MessageTooLarge,
            "a message has 5 bytes; the limit of the transport is 4",
        ),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", errors.NotOffered, "h:1 does not offer this call"),
        (CANCELLED, "Locally cancelled by application!", errors.RequestAborted, "the call was cancelled"),
        (CANCELLED, "Channel closed!", errors.RequestAborted, "the call was cancelled"),
        (CANCELLED, "CANCELLED", errors.ConnectionLost, "h:1 dropped the call"),
        (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "",
            errors.DeadlinePassed,
            "h:1 did not answer within the call's deadline",
        ),
        (grpc.StatusCode.INTERNAL, "", errors.InternalFault, "h:1 answered INTERNAL"),
        (grpc.StatusCode.PERMISSION_DENIED, "no", errors.PermissionDenied, "no"),
        (grpc.StatusCode.UNAUTHENTICATED, "no", errors.Unauthenticated, "no"),
    ],
)
def test_statuses_that_grpc_makes_become_classes(code, details, expected, message):
    error = from_rpc_error(Ended(code, details), target="h:1")

    assert type(error) is expected
    assert error.message == message


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_code_has_a_class_of_the_same_meaning(code):
    error = from_rpc_error(Ended(code, "text"))

    assert isinstance(error, EngineError)
    assert type(error) is not EngineError


def test_a_reason_of_a_later_version_falls_back_to_the_code():
    detail = error_pb2.ErrorDetail(reason="NEWER_THAN_US")
    status = status_pb2.Status(code=grpc.StatusCode.NOT_FOUND.value[0], message="no such thing")
    status.details.add().Pack(detail)
    ended = Ended(
        grpc.StatusCode.NOT_FOUND, "no such thing", (("grpc-status-details-bin", status.SerializeToString()),)
    )

    assert type(from_rpc_error(ended)) is errors.CallerError


@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"", status_pb2.Status(code=5).SerializeToString()])
def test_unreadable_details_are_as_none(body):
    ended = Ended(grpc.StatusCode.UNAVAILABLE, "Socket closed", (("grpc-status-details-bin", body),))

    assert type(from_rpc_error(ended)) is errors.ConnectionLost


def test_missing_metadata_is_as_none():
    ended = SimpleNamespace(
        code=lambda: grpc.StatusCode.CANCELLED, details=lambda: None, trailing_metadata=lambda: None
    )

    assert type(from_rpc_error(ended)) is errors.ConnectionLost


def test_the_border_turns_a_bug_into_a_fault_whose_id_is_in_the_log(caplog):
    with caplog.at_level(logging.ERROR), pytest.raises(errors.InternalFault) as raised, fault_border("step"):
        raise KeyError("secret")

    (record,) = caplog.records
    assert record.error_id in raised.value.message
    assert raised.value.error_id == record.error_id
    assert record.where == "step"
    assert record.exc_info is not None
    assert "secret" not in raised.value.message


def test_the_border_lets_our_errors_and_exits_pass(caplog):
    for error in (errors.QueueFull("full"), KeyboardInterrupt(), grpc.aio.AbortError()):
        with pytest.raises(type(error)) as raised, fault_border("step"):
            raise error
        assert raised.value is error

    assert not caplog.records


class Gone:
    """A call whose caller has hung up: gRPC cannot send a status, and says so in its own way."""

    async def abort(self, code, details, metadata):
        raise grpc.aio.InternalError("Failed grpc_call_start_batch")


async def test_a_caller_that_has_gone_before_its_refusal_is_no_fault():
    with pytest.raises(asyncio.CancelledError):
        await abort_with(Gone(), errors.Loading("no worker yet"))
