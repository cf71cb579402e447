"""Frozen types to bytes and back: the only door between the services and the messages of the plan path.

Knows how a message travels (bytes, checksum), not what it means. Guards: decoding raises only the taxonomy's errors.
"""

import zlib
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from protos.forwardplane.v1 import plan_pb2
from protos.forwardplane.v1.worker_pb2 import AttachReply, BucketList
from protos.wire import limits
from protos.wire.codec_plan import identity_from_proto, plan_from_proto, plan_to_proto
from protos.wire.codec_result import result_from_proto, result_to_proto
from protos.wire.codec_worker import bucket_list_from_proto, bucket_list_to_proto, info_from_proto, info_to_proto
from protos.wire.errors import DataFault, EngineError, InvalidPlan
from protos.wire.plan import ForwardPlan, PlanIdentity
from protos.wire.result import ForwardResult
from protos.wire.worker_info import Buckets, WorkerInfo


def checksum(body: bytes) -> int:
    """CRC-32 of a message's inner bytes."""
    return zlib.crc32(body)


def open_message(body: bytes, crc32: int) -> bytes:
    """`body`, after its checksum was found right.

    Raises:
        DataFault: it is not.
    """
    actual = checksum(body)
    if actual != crc32:
        text = f"the checksum of {len(body)} bytes is {actual:#010x}, the sender said {crc32:#010x}"
        raise DataFault(text, field="crc32")
    return body


def encode_plan(plan: ForwardPlan) -> bytes:
    """The inner bytes of a plan message. Equal plans give equal bytes."""
    return plan_to_proto(plan).SerializeToString(deterministic=True)


def decode_plan(body: bytes) -> ForwardPlan:
    """The plan in `body`, not validated yet. Its arrays are read-only.

    Raises:
        InvalidPlan: the bytes are no plan, or a column, list or choice is malformed; carries the seq when it was read.
        UnsupportedFeature: an enum value this release does not know.
    """
    message = _parse_plan(body)
    try:
        return plan_from_proto(message)
    except EngineError as error:
        error.plan_seq = message.identity.seq or None
        raise


def decode_identity(body: bytes) -> PlanIdentity:
    """Only the identity of the plan in `body`: what ordering and fencing need, also when its columns are malformed.

    Raises:
        DataFault: the bytes are no plan, or its identity is malformed: nothing can be answered by seq.
    """
    try:
        return identity_from_proto(_parse_plan(body))
    except InvalidPlan as error:
        raise DataFault(error.message, field=error.field, plan_seq=error.plan_seq) from None


def encode_result(result: ForwardResult) -> bytes:
    """The inner bytes of a result message."""
    return result_to_proto(result).SerializeToString(deterministic=True)


def decode_result(body: bytes) -> ForwardResult:
    """The result in `body`, well formed. Its arrays are read-only.

    Raises:
        DataFault: it is not well formed.
    """
    if len(body) > limits.MAX_RESULT_BYTES:
        raise DataFault(f"a result has {len(body)} bytes, the limit is {limits.MAX_RESULT_BYTES}", field="body")
    message = plan_pb2.ForwardResult()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise DataFault("the bytes of a result cannot be read", field="body") from None
    return result_from_proto(message)


def worker_info_to_proto(info: WorkerInfo) -> AttachReply:
    """The answer to Attach."""
    return info_to_proto(info)


def worker_info_from_proto(reply: AttachReply) -> WorkerInfo:
    """What the worker said of itself.

    Raises:
        ProtocolMismatch: an enum or geometry this release cannot work with.
    """
    return info_from_proto(reply)


def buckets_to_proto(buckets: Iterable[Buckets]) -> list[BucketList]:
    """Captured sizes by phase, as Attach and reports carry them."""
    return [bucket_list_to_proto(entry) for entry in buckets]


def buckets_from_proto(messages: Iterable[BucketList]) -> tuple[Buckets, ...]:
    """Captured sizes of the phases that this release knows."""
    found = (bucket_list_from_proto(message) for message in messages)
    return tuple(entry for entry in found if entry is not None)


def _parse_plan(body: bytes) -> plan_pb2.ForwardPlan:
    if len(body) > limits.MAX_PLAN_BYTES:
        raise InvalidPlan(f"a plan has {len(body)} bytes, the limit is {limits.MAX_PLAN_BYTES}", field="body")
    message = plan_pb2.ForwardPlan()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise InvalidPlan("the bytes of a plan cannot be read", field="body") from None
    return message
