"""What every call of the callers' gRPC port passes, from the outermost on: statuses, watch, door, gate."""

import grpc

from protos.forwardplane.v1 import generate_pb2
from protos.service.access import AccessInterceptor
from protos.service.readable import checked_calls
from protos.service.revoked_peers import RevokedPeers
from protos.service.status import StatusInterceptor
from protos.wire.limits import MAX_CALLER_MESSAGE_BYTES
from scheduler_svc.edge.call_gate import CallGate, GateInterceptor
from scheduler_svc.edge.connection_watch import WatchInterceptor
from scheduler_svc.edge.edge_parts import EdgeParts
from scheduler_svc.edge.metrics import CallMetrics

_SERVICE = generate_pb2.DESCRIPTOR.services_by_name["GenerationService"]
SERVICE_NAME = _SERVICE.full_name

GENERATING = ("Generate", "GenerateOnce", "Embed")
"""Calls that run streams of the core; the others end at once."""
_MAX_SHORT_CALLS = 256


def call_gates(max_streams: int) -> dict[str, CallGate]:
    """The gate of every method of the callers' service, by its full name with slashes."""
    generating = CallGate(max_streams, what="generating calls")
    short = CallGate(_MAX_SHORT_CALLS, what="short calls")
    names = [method.name for method in _SERVICE.methods]
    return {f"/{SERVICE_NAME}/{name}": generating if name in GENERATING else short for name in names}


def port_interceptors(
    parts: EdgeParts, *, max_streams: int, hardened: bool, revoked: RevokedPeers
) -> list[grpc.aio.ServerInterceptor]:
    """Of one edge's port. A hardened one closes connections that waste most of their calls."""
    observers = [CallMetrics(parts.metrics, SERVICE_NAME)]
    # The gate reads the message of a unary call as a stream of one.
    status = StatusInterceptor(observers, max_request_bytes=MAX_CALLER_MESSAGE_BYTES, check_stream=checked_calls)
    watch = (WatchInterceptor(parts.metrics.closed_connections),) if hardened else ()
    gate = GateInterceptor(call_gates(max_streams), parts.metrics)
    return [status, *watch, AccessInterceptor(parts.door.admit, revoked), gate]
