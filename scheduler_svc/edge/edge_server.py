"""The gRPC side of an edge: servicer, health, reflection, and how they stop.

Made by `edge_app`. Guards: an edge that stops takes nothing new, and gives what runs its time.
"""

import asyncio
import logging
from dataclasses import dataclass

import grpc

from protos.forwardplane.v1 import generate_pb2_grpc
from protos.service.revoked_peers import NOBODY_REVOKED, RevokedPeers
from protos.service.server import HealthServer, ServerOptions, add_reflection, bind_port, build_server
from protos.wire.errors import Draining
from protos.wire.limits import MAX_REFUSABLE_MESSAGE_BYTES
from scheduler_svc.edge.edge_parts import EdgeParts
from scheduler_svc.edge.generation_servicer import GenerationServicer
from scheduler_svc.edge.model_facts import ModelFacts
from scheduler_svc.edge.port_interceptors import SERVICE_NAME, port_interceptors

logger = logging.getLogger(__name__)

# Calls beyond the edge's own limits should reach the edge, which refuses them with a reason.
_MAX_TRANSPORT_CALLS = 1 << 16
_MAX_REFUSED_CALLS_HARDENED = 256
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
    revoked: RevokedPeers = NOBODY_REVOKED
    """Callers that are kept out."""
    hardened: bool = False
    """No reflection, no patience."""

    def max_connection_calls(self, max_streams: int) -> int:
        """Most calls of one connection that this process has not done with, those that were given up included.

        gRPC refuses more without a reason, even to clients that keep the limit: it counts a call for some time after
        its client has seen its end.
        """
        return max_streams + _MAX_REFUSED_CALLS_HARDENED if self.hardened else _MAX_TRANSPORT_CALLS


class EdgeServer:
    """Made by the edge's composition root, in the event loop; started and stopped once."""

    def __init__(self, parts: EdgeParts, address: EdgeAddress, *, max_streams: int) -> None:
        self._link = parts.link
        self._address = address
        self._max_connection_calls = address.max_connection_calls(max_streams)
        self._interceptors = port_interceptors(
            parts, max_streams=max_streams, hardened=address.hardened, revoked=address.revoked
        )
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
            max_concurrent_streams=self._max_connection_calls,
            max_pending_calls=_MAX_TRANSPORT_CALLS,
            max_message_bytes=MAX_REFUSABLE_MESSAGE_BYTES,
            shares_port=where.shares_port,
            hardened=where.hardened,
        )
        server = build_server(options=options, interceptors=self._interceptors)
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
