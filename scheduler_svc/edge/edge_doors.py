"""The doors of an edge, made from the settings: the gRPC server's address and the HTTP front."""

import importlib
import ssl
from typing import TYPE_CHECKING

from protos.service.credentials import server_credentials
from protos.service.lifecycle import Part
from protos.service.revoked_peers import NOBODY_REVOKED, RevokedPeers
from protos.service.security_config import open_revoked_peers, open_tls_folder
from scheduler_svc.config import SchedulerConfig, SchedulerTlsConfig
from scheduler_svc.edge.caller_rights import needs_certificate
from scheduler_svc.edge.edge_parts import EdgeParts
from scheduler_svc.edge.edge_server import EdgeAddress, EdgeServer
from scheduler_svc.edge.http_front.http_server import HttpAddress, HttpLimits, HttpServer

if TYPE_CHECKING:
    from protos.service.tls_files import TlsFolder

# By name, so that the library of certificates is loaded only where settings ask for TLS.
_HTTP_TLS = "scheduler_svc.edge.http_front.http_tls"
# Calls beyond the edge's streams should reach the edge, which refuses them with a reason.
_CALL_MARGIN = 256
STOP_MARGIN_S = 5.0
"""What a stop may take beside the time that running streams are given."""


def door_parts(config: SchedulerConfig, edge_index: int, parts: EdgeParts) -> tuple[Part, ...]:
    """That edge's HTTP front, if the settings ask for one, and its gRPC server, in start order.

    The gRPC door is stopped first: its stop drains the streams of both.

    Raises:
        InvalidRequest: the folder of certificates, or a revocation list, cannot be used.
    """
    files = open_tls_folder(config.tls.caller_tls_dir, needs_authority=needs_certificate(config.tls))
    revoked = open_revoked_peers(files if needs_certificate(config.tls) else None)
    where = edge_address(config, edge_index, files, revoked)
    server = EdgeServer(parts, where, max_streams=config.edge.max_streams)
    grpc_door = _server_part(server, drain_timeout_s=config.process.drain_timeout_s)
    if config.edge.http_port is None:
        return (grpc_door,)
    address = HttpAddress(
        host=config.edge.host,
        port=config.edge.http_port,
        shares_port=config.process.edges > 1,
        tls=None if files is None else _http_context(files, config.tls),
        kept_out=revoked.kept_out,
    )
    http = HttpServer(parts, address, HttpLimits(max_calls=config.edge.max_streams + _CALL_MARGIN))
    return Part(name="HTTP front", start=http.start, stop=http.stop), grpc_door


def _server_part(server: EdgeServer, *, drain_timeout_s: float) -> Part:
    async def stop() -> None:
        await server.drain(timeout_s=drain_timeout_s)
        await server.stop()

    return Part(name="callers' server", start=server.start, stop=stop, stop_limit_s=drain_timeout_s + STOP_MARGIN_S)


def edge_address(
    config: SchedulerConfig,
    edge_index: int,
    files: "TlsFolder | None" = None,
    revoked: RevokedPeers = NOBODY_REVOKED,
) -> EdgeAddress:
    """Where that edge listens: all on one gRPC port, each with a health port of its own."""
    return EdgeAddress(
        host=config.edge.host,
        port=config.edge.port,
        health_port=own_port(config.edge.health_port, edge_index),
        shares_port=config.process.edges > 1,
        credentials=None if files is None else server_credentials(files, needs_client=needs_certificate(config.tls)),
        revoked=revoked,
        hardened=config.tls.hardened,
    )


def own_port(first_port: int, edge_index: int) -> int:
    """The port of that edge in a row that begins with `first_port`; 0 stays 0, any free one."""
    return first_port and first_port + edge_index


def _http_context(files: "TlsFolder", tls: SchedulerTlsConfig) -> ssl.SSLContext:
    assert tls.caller_tls_dir is not None, "the files come from there"
    module = importlib.import_module(_HTTP_TLS)
    context: ssl.SSLContext = module.http_context(files, tls.caller_tls_dir, needs_client=needs_certificate(tls))
    return context
