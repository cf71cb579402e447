"""Composition root of an edge process: its parts, and the order they start and stop in.

Reads card, tokenizer and template of the model, never its tensors.
"""

import asyncio
import logging

from protos.service.lifecycle import ExitCode, Lifecycle, Part
from protos.service.logs import install_level_signals
from protos.service.metrics import MetricsServer
from protos.service.model_files import read_model_folder
from protos.service.tracing import open_tracing, tracing_part
from scheduler_svc.bridge.client import BridgeClient
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.edge.caller_rights import caller_rights
from scheduler_svc.edge.core_link import CoreLink
from scheduler_svc.edge.edge_doors import STOP_MARGIN_S, door_parts, own_port
from scheduler_svc.edge.edge_parts import EdgeParts
from scheduler_svc.edge.edge_text import EdgeText

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 30.0


async def run_edge(config: SchedulerConfig, edge_index: int) -> int:
    """Run one edge process until it is told to stop, or the core is gone; returns its exit code.

    Raises:
        EngineError: the model folder, or a file that the settings name, cannot be used.
    """
    text = EdgeText(read_model_folder(config.model.folder), config.grammar)
    bridge = BridgeClient(config.process.socket_path, edge_index=edge_index)
    link = CoreLink(bridge, text.facts, max_streams=config.edge.max_streams)
    metrics_server = MetricsServer()
    tracing = open_tracing(config.observability.traces(), service="forwardplane-edge")
    parts = EdgeParts.joined(
        link,
        text,
        metrics_server.registry,
        buckets=config.observability.buckets(),
        rights=caller_rights(config),
        tracing=tracing,
    )
    doors = door_parts(config, edge_index, parts)
    lifecycle = Lifecycle()
    lifecycle.add(_metrics_part(metrics_server, config, edge_index))
    if tracing is not None:
        lifecycle.add(tracing_part(tracing))
    lifecycle.add(Part(name="text", start=text.start, stop=text.stop))
    lifecycle.add(_core_part(bridge, link, lifecycle))
    for door in doors:
        lifecycle.add(door)
    install_level_signals(asyncio.get_running_loop())
    return int(await lifecycle.run())


def _core_part(bridge: BridgeClient, link: CoreLink, lifecycle: Lifecycle) -> Part:
    async def start() -> None:
        await bridge.connect(timeout_s=_CONNECT_TIMEOUT_S)
        link.start(on_gone=lambda: lifecycle.request_stop("the core is gone", ExitCode.FAILURE))

    async def stop() -> None:
        await link.stop()
        await bridge.close()

    return Part(name="core link", start=start, stop=stop, start_limit_s=_CONNECT_TIMEOUT_S + STOP_MARGIN_S)


def _metrics_part(server: MetricsServer, config: SchedulerConfig, edge_index: int) -> Part:
    async def start() -> None:
        port = server.start(config.observability.metrics_host, own_port(config.edge.edge_metrics_port, edge_index))
        logger.info("metrics", extra={"port": port})

    async def stop() -> None:
        await asyncio.to_thread(server.stop)

    return Part(name="metrics", start=start, stop=stop)
