"""Builds gRPC servers with explicit limits, binds their ports with clear errors, and serves health and reflection.

Knows no servicer of ours. gRPC's C core writes notes to standard error unless GRPC_VERBOSITY=ERROR is in the
environment before `grpc` is imported, as it is for processes started with `config.environment()`.
"""

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos.service.health import STATES, HealthServicer
from protos.wire.errors import CannotListen, PortInUse
from protos.wire.limits import MAX_CALLER_MESSAGE_BYTES, MAX_PLAN_BYTES, MAX_RESULT_BYTES

Options = tuple[tuple[str, int], ...]

_IDENTITY_ONLY = 1
"""Bit 0 of gRPC's bit set of compression algorithms: none."""


class PortProfile(Enum):
    """Who connects to a port."""

    CALLER = "caller"
    """Anybody: gRPC's strict defaults against pings, so that abuse ends in GOAWAY."""
    PLAN = "plan"
    """A scheduler of ours, which pings every two seconds; the server pings too and so notices a stopped one."""


LEAST_PING_INTERVAL_MS = 300_000
"""Callers that ping more often while nothing is sent to them get GOAWAY: gRPC's default, also on hardened ports."""
_MESSAGE_BYTES = {
    PortProfile.CALLER: MAX_CALLER_MESSAGE_BYTES,
    PortProfile.PLAN: max(MAX_PLAN_BYTES, MAX_RESULT_BYTES),
}
_KEEPALIVE: dict[PortProfile, Options] = {
    PortProfile.CALLER: (),
    PortProfile.PLAN: (
        ("grpc.keepalive_time_ms", 2000),
        ("grpc.keepalive_timeout_ms", 1000),
        ("grpc.http2.ping_timeout_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ),
}


_HARDENED: dict[PortProfile, Options] = {
    PortProfile.CALLER: (
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_ping_strikes", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", LEAST_PING_INTERVAL_MS),
        ("grpc.max_connection_idle_ms", 120_000),
    ),
    PortProfile.PLAN: (("grpc.http2.max_ping_strikes", 1),),
}
"""Not the age of connections: that would cut streams off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What differs between our servers."""

    profile: PortProfile = PortProfile.CALLER
    max_message_bytes: int | None = None
    """Both directions; absent: the profile's (4 MiB, plans 8 MiB)."""
    hardened: bool = False
    """No patience with abuse: one bad ping ends a connection. So does having no call for two minutes on a CALLER port;
    links to workers may be idle."""
    handshake_timeout_ms: int = 10_000
    """gRPC's own is two minutes, in which each half-open connection holds a descriptor."""
    max_concurrent_streams: int = 1024
    """Per connection; a caller's further calls wait in its own channel."""
    max_pending_calls: int | None = None
    """Most calls of all connections that no handler has taken yet; gRPC cancels more, without a reason. Absent: gRPC's
    own choice, from 1,000 on by chance and from 3,000 on all."""
    shares_port: bool = False
    """Several processes may listen on the port; the parent has proved it free (`prove_port_free`)."""


def build_server(*, options: ServerOptions, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> grpc.aio.Server:
    """A server without port and servicers. Must be called in a running event loop."""
    limit = options.max_message_bytes or _MESSAGE_BYTES[options.profile]
    settings: Options = (
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_send_message_length", limit),
        ("grpc.max_concurrent_streams", options.max_concurrent_streams),
        ("grpc.so_reuseport", int(options.shares_port)),
        ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
        *_pending(options.max_pending_calls),
        ("grpc.server_handshake_timeout_ms", options.handshake_timeout_ms),
        *_KEEPALIVE[options.profile],
        *(_HARDENED[options.profile] if options.hardened else ()),
    )
    return grpc.aio.server(interceptors=list(interceptors), options=settings)


def _pending(max_calls: int | None) -> Options:
    """With the hard limit at the other one, gRPC leaves nothing to chance."""
    if max_calls is None:
        return ()
    return (("grpc.server.max_pending_requests", max_calls), ("grpc.server.max_pending_requests_hard_limit", max_calls))


def bind_port(
    server: grpc.aio.Server,
    host: str,
    port: int,
    *,
    shares_port: bool = False,
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    """Let `server` listen, in plain text without `credentials`; the port it got (0 asks for any free one).

    Raises:
        PortInUse: another process listens there.
        CannotListen: the address is not ours, or needs rights this process lacks.
    """
    if not shares_port:
        prove_port_free(host, port)
    try:
        if credentials is not None:
            return server.add_secure_port(address(host, port), credentials)
        return server.add_insecure_port(address(host, port))
    except RuntimeError:
        prove_port_free(host, port)
        raise CannotListen(f"cannot listen on {address(host, port)}", field="port") from None


def prove_port_free(host: str, port: int) -> None:
    """Binds and releases the port, since gRPC neither says why it could not bind nor keeps quiet about it.

    Raises:
        PortInUse, CannotListen: as `bind_port`.
    """
    bound_socket(host, port).close()


def bound_socket(host: str, port: int, *, shares_port: bool = False) -> socket.socket:
    """A TCP socket of that address, bound and not listening; the caller closes it.

    Raises:
        PortInUse, CannotListen: as `bind_port`.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise CannotListen(f"cannot listen on {host}: {error.strerror}", field="host") from None
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shares_port else socket.SO_REUSEADDR, 1)
    try:
        bound.bind(place)
    except OSError as error:
        bound.close()
        raise listen_error(error, host, port) from None
    return bound


def listen_error(error: OSError, host: str, port: int) -> CannotListen:
    """What a failed bind means."""
    if error.errno == errno.EADDRINUSE:
        return PortInUse(f"port {port} is in use on {host}", field="port")
    reason = error.strerror or type(error).__name__
    return CannotListen(f"cannot listen on {address(host, port)}: {reason}", field="port")


def address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Let tools list the services; left out when hardened."""
    reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)


class HealthServer:
    """Health of this process by service name, on a plain-text port of its own for probes and on any other server.

    The name "" says that the process lives; a full service name says that it can take work. Made by `app.py` in the
    event loop, lives until the process ends.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        self._names = tuple(service_names)
        self._servicer = HealthServicer()
        self._server: grpc.aio.Server | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Answer health calls on `server` too."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def start(self, host: str, port: int) -> int:
        """Listen, with every service not serving yet; the port.

        Raises:
            PortInUse, CannotListen: as `bind_port`.
        """
        for name in self._names:
            await self._servicer.set(name, STATES.NOT_SERVING)
        server = build_server(options=ServerOptions())
        self.add_to(server)
        bound = bind_port(server, host, port)
        await server.start()
        self._server = server
        return bound

    async def set_serving(self, service_name: str, *, is_serving: bool) -> None:
        """Tell every watcher. After `drain` nothing serves any more."""
        assert service_name in self._names, service_name
        await self._servicer.set(service_name, STATES.SERVING if is_serving else STATES.NOT_SERVING)

    async def drain(self) -> None:
        """Nothing serves from now on, not even the name ""."""
        await self._servicer.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Close the port; watchers are cut off."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
