"""WorkerInfo to the answer of Attach and back. Public entry points are in `codec`.

What a newer worker offers and this release does not know (features, modes, bucket phases) is left out: it is not used.
What must be understood to build a plan at all (sub-pool kinds, hidden modes) is refused.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import TypeVar

from protos.forwardplane.v1 import worker_pb2
from protos.forwardplane.v1.plan_pb2 import ForwardMode as ProtoForwardMode
from protos.forwardplane.v1.plan_pb2 import GraphPhase as ProtoGraphPhase
from protos.forwardplane.v1.plan_pb2 import HiddenMode as ProtoHiddenMode
from protos.wire import limits
from protos.wire.enums import Feature, ForwardMode, GraphPhase, HiddenMode, SubPoolKind
from protos.wire.errors import ProtocolMismatch
from protos.wire.worker_info import Buckets, Fingerprints, SubPool, WorkerInfo, WorkerLimits

EnumT = TypeVar("EnumT", bound=IntEnum)

LIMIT_FIELDS = tuple(worker_pb2.WorkerLimits.DESCRIPTOR.fields_by_name)
FINGERPRINT_FIELDS = tuple(worker_pb2.Fingerprints.DESCRIPTOR.fields_by_name)


def info_to_proto(info: WorkerInfo) -> worker_pb2.AttachReply:
    """The message of `info`; sets are written in rising order, so equal infos give equal bytes."""
    return worker_pb2.AttachReply(
        incarnation=info.incarnation,
        protocol=info.protocol,
        features=sorted(info.features),
        sub_pools=[_sub_pool_to_proto(sub_pool) for sub_pool in info.sub_pools],
        limits=worker_pb2.WorkerLimits(**{name: getattr(info.limits, name) for name in LIMIT_FIELDS}),
        logits_width=info.logits_width,
        buckets=[bucket_list_to_proto(buckets) for buckets in info.buckets],
        modes=[ProtoForwardMode.ValueType(mode) for mode in sorted(info.modes)],
        numerics=info.numerics,
        dtype=info.dtype,
        device=info.device,
        model_name=info.model_name,
        fingerprints=worker_pb2.Fingerprints(**{name: getattr(info.fingerprints, name) for name in FINGERPRINT_FIELDS}),
        max_hidden_mode=ProtoHiddenMode.ValueType(info.max_hidden_mode),
        kernels=info.kernels,
        version=info.version,
    )


def info_from_proto(message: worker_pb2.AttachReply) -> WorkerInfo:
    """What the worker said of itself.

    Raises:
        ProtocolMismatch: an enum this release does not know, or a geometry that no plan could satisfy.
    """
    if len(message.incarnation) != limits.INCARNATION_BYTES:
        text = f"incarnation has {len(message.incarnation)} bytes, not {limits.INCARNATION_BYTES}"
        raise ProtocolMismatch(text, field="incarnation")
    if not 1 <= len(message.sub_pools) <= limits.MAX_SUB_POOLS:
        text = f"sub_pools has {len(message.sub_pools)} entries, allowed are 1 to {limits.MAX_SUB_POOLS}"
        raise ProtocolMismatch(text, field="sub_pools")
    buckets = (bucket_list_from_proto(bucket) for bucket in message.buckets)
    return WorkerInfo(
        incarnation=message.incarnation,
        protocol=message.protocol,
        features=_known_offers(Feature, message.features),
        sub_pools=tuple(_sub_pool_from_proto(sub_pool) for sub_pool in message.sub_pools),
        limits=WorkerLimits(**{name: getattr(message.limits, name) for name in LIMIT_FIELDS}),
        logits_width=message.logits_width,
        buckets=tuple(bucket for bucket in buckets if bucket is not None),
        modes=_known_offers(ForwardMode, message.modes),
        numerics=message.numerics,
        dtype=message.dtype,
        device=message.device,
        model_name=message.model_name,
        fingerprints=Fingerprints(**{name: getattr(message.fingerprints, name) for name in FINGERPRINT_FIELDS}),
        max_hidden_mode=_known(HiddenMode, message.max_hidden_mode, field="max_hidden_mode"),
        kernels=message.kernels,
        version=message.version,
    )


def bucket_list_to_proto(buckets: Buckets) -> worker_pb2.BucketList:
    """The message of one phase's captured sizes."""
    return worker_pb2.BucketList(
        phase=ProtoGraphPhase.ValueType(buckets.phase),
        sizes=buckets.sizes,
        live=buckets.live,
        slots=buckets.slots,
        dead=buckets.dead,
        graph_bytes=buckets.graph_bytes,
        capture_ms=buckets.capture_ms,
    )


def bucket_list_from_proto(message: worker_pb2.BucketList) -> Buckets | None:
    """One phase's captured sizes, or `None` for a phase this release does not know."""
    phase = _known_or_none(GraphPhase, message.phase)
    if phase is None:
        return None
    return Buckets(
        phase=phase,
        sizes=tuple(message.sizes),
        live=tuple(message.live),
        slots=message.slots,
        dead=tuple(message.dead),
        graph_bytes=message.graph_bytes,
        capture_ms=message.capture_ms,
    )


def _sub_pool_to_proto(sub_pool: SubPool) -> worker_pb2.SubPool:
    return worker_pb2.SubPool(
        kind=worker_pb2.SubPoolKind.ValueType(sub_pool.kind),
        num_pages=sub_pool.num_pages,
        page_size=sub_pool.page_size,
        bytes_per_page=sub_pool.bytes_per_page,
        window_tokens=sub_pool.window_tokens,
    )


def _sub_pool_from_proto(message: worker_pb2.SubPool) -> SubPool:
    if message.page_size < 1:
        raise ProtocolMismatch("sub_pools.page_size is 0", field="sub_pools.page_size")
    return SubPool(
        kind=_known(SubPoolKind, message.kind, field="sub_pools.kind"),
        num_pages=message.num_pages,
        page_size=message.page_size,
        bytes_per_page=message.bytes_per_page,
        window_tokens=message.window_tokens,
    )


def _known(kind: type[EnumT], value: int, *, field: str) -> EnumT:
    known = _known_or_none(kind, value)
    if known is None:
        raise ProtocolMismatch(f"{field} has value {value}, which is not known here", field=field)
    return known


def _known_offers(kind: type[EnumT], values: Iterable[int]) -> frozenset[EnumT]:
    members = (_known_or_none(kind, value) for value in values)
    return frozenset(member for member in members if member is not None)


def _known_or_none(kind: type[EnumT], value: int) -> EnumT | None:
    return kind(value) if value in kind._value2member_map_ else None
