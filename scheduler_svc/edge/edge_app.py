"""Composition root of an edge process: its parts, and the order they start and stop in.

Reads card, tokenizer and template of the model, never its tensors.
"""

import asyncio
import importlib
import logging
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING

from protos.service.credentials import server_credentials
from protos.service.lifecycle import ExitCode, Lifecycle, Part
from protos.service.logs import install_level_signals
from protos.service.metrics import MetricsServer
from protos.service.model_files import read_model_folder
from protos.service.security_config import open_tls_folder
from protos.wire.enums import HiddenMode
from scheduler_svc.bridge.client import BridgeClient
from scheduler_svc.config import CallerCertificates, SchedulerConfig, SchedulerTlsConfig
from scheduler_svc.edge.caller_book import CallerBook
from scheduler_svc.edge.caller_door import KnownCallers
from scheduler_svc.edge.core_link import CoreLink
from scheduler_svc.edge.edge_parts import CallerRights, EdgeParts
from scheduler_svc.edge.edge_server import EdgeAddress, EdgeServer
from scheduler_svc.edge.edge_text import EdgeText
from scheduler_svc.edge.http_front.http_server import HttpAddress, HttpLimits, HttpServer
from scheduler_svc.edge.resolve_request import check_generation_defaults
from scheduler_svc.edge.resume_tickets import TicketDesk, read_keys
from scheduler_svc.edge.resuming import ResumeDesk

if TYPE_CHECKING:
    from protos.service.tls_files import TlsFolder

logger = logging.getLogger(__name__)

# By name, so that the library of certificates is loaded only where settings ask for TLS.
_HTTP_TLS = "scheduler_svc.edge.http_front.http_tls"
_CONNECT_TIMEOUT_S = 30.0
# What a stop may take beside the time that running streams are given.
_STOP_MARGIN_S = 5.0
# Calls beyond the edge's streams should reach the edge, which refuses them with a reason.
_CALL_MARGIN = 256


async def run_edge(config: SchedulerConfig, edge_index: int) -> int:
    """Run one edge process until it is told to stop, or the core is gone; returns its exit code.

    Raises:
        EngineError: the model folder cannot be used.
    """
    folder = read_model_folder(config.model.folder)
    check_generation_defaults(folder.card)
    text = EdgeText(folder, config.grammar)
    bridge = BridgeClient(config.process.socket_path, edge_index=edge_index)
    link = CoreLink(bridge, folder.card, has_chat_template=text.has_chat_template, max_streams=config.edge.max_streams)
    metrics_server = MetricsServer()
    parts = EdgeParts.joined(
        link,
        text,
        metrics_server.registry,
        rights=CallerRights(
            known=_known_callers(config.tls),
            resuming=_resume_desk(config.resume.resume_key_file),
            max_hidden_mode=HiddenMode[config.edge.max_hidden_mode.name],
        ),
    )
    files = open_tls_folder(config.tls.caller_tls_dir, needs_authority=_needs_certificate(config.tls))
    server = EdgeServer(parts, edge_address(config, edge_index, files), max_streams=config.edge.max_streams)
    lifecycle = Lifecycle()
    lifecycle.add(_metrics_part(metrics_server, config, edge_index))
    lifecycle.add(Part(name="text", start=text.start, stop=text.stop))
    lifecycle.add(_core_part(bridge, link, lifecycle))
    if config.edge.http_port is not None:
        lifecycle.add(_http_part(parts, config, files))
    lifecycle.add(_server_part(server, drain_timeout_s=config.process.drain_timeout_s))
    install_level_signals(asyncio.get_running_loop())
    return int(await lifecycle.run())


def _resume_desk(path: Path | None) -> ResumeDesk:
    """Seals with the first key of the file.

    Raises:
        InvalidRequest: the file of keys cannot be used.
    """
    if path is None:
        logger.info("callers cannot resume their streams when this scheduler dies: set resume_key_file")
        return ResumeDesk(None)
    return ResumeDesk(TicketDesk(read_keys(path), unix_clock=time.time))


def _needs_certificate(tls: SchedulerTlsConfig) -> bool:
    return tls.caller_certificates is CallerCertificates.REQUIRED


def _known_callers(tls: SchedulerTlsConfig) -> KnownCallers:
    """Who may call.

    Raises:
        InvalidRequest: the file of callers cannot be used.
    """
    if tls.callers is not None:
        return KnownCallers(book=CallerBook(tls.callers, clock=time.monotonic))
    if _needs_certificate(tls):
        return KnownCallers(certificate_domain=tls.trust_domain)
    if tls.caller_tls_dir is not None:
        logger.warning("the callers' ports are encrypted, and everybody who reaches them may call: set callers")
    return KnownCallers()


def edge_address(config: SchedulerConfig, edge_index: int, files: "TlsFolder | None" = None) -> EdgeAddress:
    """Where that edge listens: all on one gRPC port, each with a health port of its own."""
    needs_client = _needs_certificate(config.tls)
    return EdgeAddress(
        host=config.edge.host,
        port=config.edge.port,
        health_port=own_port(config.edge.health_port, edge_index),
        shares_port=config.process.edges > 1,
        credentials=None if files is None else server_credentials(files, needs_client=needs_client),
        hardened=config.tls.hardened,
    )


def own_port(first_port: int, edge_index: int) -> int:
    """The port of that edge in a row that begins with `first_port`; 0 stays 0, any free one."""
    return first_port and first_port + edge_index


def _core_part(bridge: BridgeClient, link: CoreLink, lifecycle: Lifecycle) -> Part:
    async def start() -> None:
        await bridge.connect(timeout_s=_CONNECT_TIMEOUT_S)
        link.start(on_gone=lambda: lifecycle.request_stop("the core is gone", ExitCode.FAILURE))

    async def stop() -> None:
        await link.stop()
        await bridge.close()

    return Part(name="core link", start=start, stop=stop, start_limit_s=_CONNECT_TIMEOUT_S + _STOP_MARGIN_S)


def _server_part(server: EdgeServer, *, drain_timeout_s: float) -> Part:
    async def stop() -> None:
        await server.drain(timeout_s=drain_timeout_s)
        await server.stop()

    return Part(name="callers' server", start=server.start, stop=stop, stop_limit_s=drain_timeout_s + _STOP_MARGIN_S)


def _http_part(parts: EdgeParts, config: SchedulerConfig, files: "TlsFolder | None") -> Part:
    """Stopped after the gRPC door, whose stop drains the streams of both."""
    assert config.edge.http_port is not None, "asked for"
    address = HttpAddress(
        host=config.edge.host,
        port=config.edge.http_port,
        shares_port=config.process.edges > 1,
        tls=None if files is None else _http_context(files, config.tls),
    )
    server = HttpServer(parts, address, HttpLimits(max_calls=config.edge.max_streams + _CALL_MARGIN))
    return Part(name="HTTP front", start=server.start, stop=server.stop)


def _http_context(files: "TlsFolder", tls: SchedulerTlsConfig) -> ssl.SSLContext:
    assert tls.caller_tls_dir is not None, "the files come from there"
    module = importlib.import_module(_HTTP_TLS)
    context: ssl.SSLContext = module.http_context(files, tls.caller_tls_dir, needs_client=_needs_certificate(tls))
    return context


def _metrics_part(server: MetricsServer, config: SchedulerConfig, edge_index: int) -> Part:
    async def start() -> None:
        port = server.start(config.observability.metrics_host, own_port(config.edge.edge_metrics_port, edge_index))
        logger.info("metrics", extra={"port": port})

    async def stop() -> None:
        await asyncio.to_thread(server.stop)

    return Part(name="metrics", start=start, stop=stop)
