"""The gRPC side of an edge: servicer, health, reflection, and how they stop.

Made by `edge_app`. Guards: an edge that stops takes nothing new, and gives what runs its time.
"""

import asyncio
import logging
from dataclasses import dataclass

import grpc

from protos.forwardplane.v1 import generate_pb2, generate_pb2_grpc
from protos.service.access import AccessInterceptor
from protos.service.readable import checked_calls
from protos.service.server import HealthServer, ServerOptions, add_reflection, bind_port, build_server
from protos.service.status import StatusInterceptor
from protos.wire.errors import Draining
from protos.wire.limits import MAX_CALLER_MESSAGE_BYTES, MAX_REFUSABLE_MESSAGE_BYTES
from scheduler_svc.edge.call_gate import CallGate, GateInterceptor
from scheduler_svc.edge.edge_parts import EdgeParts
from scheduler_svc.edge.generation_servicer import GenerationServicer
from scheduler_svc.edge.metrics import CallMetrics
from scheduler_svc.edge.model_facts import ModelFacts

logger = logging.getLogger(__name__)

SERVICE_NAME = generate_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name

GENERATING = ("Generate", "GenerateOnce", "Embed")
"""Calls that run streams of the core; the others end at once."""
_MAX_SHORT_CALLS = 256
# Calls beyond the edge's own limits should reach the edge, which refuses them with a reason.
_MAX_TRANSPORT_CALLS = 1 << 16
_POLL_S = 0.05
_STOP_GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeAddress:
    """Where one edge listens. 0 = any free port."""

    host: str
    port: int
    health_port: int
    shares_port: bool = False
    """Other edges listen on the same port; the parent has proved it free."""
    credentials: grpc.ServerCredentials | None = None
    """None: plain text."""
    hardened: bool = False
    """No reflection, no patience."""


def call_gates(max_streams: int) -> dict[str, CallGate]:
    """The gate of every method of the callers' service, by its full name with slashes."""
    generating = CallGate(max_streams, what="generating calls")
    short = CallGate(_MAX_SHORT_CALLS, what="short calls")
    names = [method.name for method in generate_pb2.DESCRIPTOR.services_by_name["GenerationService"].methods]
    return {f"/{SERVICE_NAME}/{name}": generating if name in GENERATING else short for name in names}


class EdgeServer:
    """Made by the edge's composition root, in the event loop; started and stopped once."""

    def __init__(self, parts: EdgeParts, address: EdgeAddress, *, max_streams: int) -> None:
        self._link = parts.link
        self._address = address
        self._metrics = parts.metrics
        self._gate = GateInterceptor(call_gates(max_streams), parts.metrics)
        self._admission = parts.admission
        self._door = parts.door
        self._servicer = GenerationServicer(parts)
        held = parts.link.held
        parts.metrics.held_bytes.set_function(lambda: held.total)
        parts.metrics.caller_held_bytes.set_function(lambda: held.most_of_one_caller)
        self._health = HealthServer(("", SERVICE_NAME))
        self._health_changes: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None
        self.port = 0
        self.health_port = 0

    async def start(self) -> None:
        """Listen. The service's name serves as soon as, and as long as, the core has a worker.

        Raises:
            CannotListen: a port is in use, or the address is not ours.
        """
        where = self._address
        self.health_port = await self._health.start(where.host, where.health_port)
        options = ServerOptions(
            max_concurrent_streams=_MAX_TRANSPORT_CALLS,
            max_pending_calls=_MAX_TRANSPORT_CALLS,
            max_message_bytes=MAX_REFUSABLE_MESSAGE_BYTES,
            shares_port=where.shares_port,
            hardened=where.hardened,
        )
        observers = [CallMetrics(self._metrics, SERVICE_NAME)]
        # The gate reads the message of a unary call as a stream of one.
        status = StatusInterceptor(observers, max_request_bytes=MAX_CALLER_MESSAGE_BYTES, check_stream=checked_calls)
        server = build_server(options=options, interceptors=[status, AccessInterceptor(self._door.admit), self._gate])
        generate_pb2_grpc.add_GenerationServiceServicer_to_server(self._servicer, server)
        self._health.add_to(server)
        if not where.hardened:
            add_reflection(server, [SERVICE_NAME])
        self.port = bind_port(
            server, where.host, where.port, shares_port=where.shares_port, credentials=where.credentials
        )
        await server.start()
        self._server = server
        await self._health.set_serving("", is_serving=True)
        self._link.on_facts(self._facts_changed)
        self._facts_changed(self._link.facts)
        logger.info("edge listens", extra={"port": self.port, "health_port": self.health_port})

    async def drain(self, *, timeout_s: float) -> None:
        """Refuse new requests and wait for the running ones; those that are left then are cut off."""
        self._admission.drain()
        await self._health.drain()
        try:
            async with asyncio.timeout(timeout_s):
                while self._link.num_streams:
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            logger.warning("streams are cut off", extra={"num_streams": self._link.num_streams})
            self._link.cut_off(Draining("this scheduler shut down before the request was finished"))

    async def stop(self) -> None:
        """Close the ports. Safe to repeat."""
        if self._server is not None:
            await self._server.stop(_STOP_GRACE_S)
            self._server = None
        for change in list(self._health_changes):
            change.cancel()
        await self._health.stop()

    def _facts_changed(self, facts: ModelFacts) -> None:
        change = asyncio.create_task(self._health.set_serving(SERVICE_NAME, is_serving=facts.is_serving))
        self._health_changes.add(change)
        change.add_done_callback(self._health_changes.discard)
