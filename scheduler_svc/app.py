"""Composition root of the core process: the one place that constructs the loop, the bridge and the links."""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine
from types import MappingProxyType
from typing import Any

from protos.service.channel import plan_channel
from protos.service.lifecycle import ExitCode, Lifecycle, Part
from protos.service.logs import install_level_signals
from protos.service.metrics import MetricsServer
from protos.service.model_files import ModelCard, read_model_folder
from protos.service.status import fault_border
from protos.wire.errors import EngineError
from scheduler_svc.bridge.server import BridgeServer
from scheduler_svc.config import CoreConfig, EpochSourceKind, LinksConfig, RecordingConfig, SchedulerConfig
from scheduler_svc.core.settings import CoreSettings, PolicyKind
from scheduler_svc.grammar_masks import GrammarMasks
from scheduler_svc.links.epoch import EpochSource, FileEpoch, WorkersEpoch
from scheduler_svc.links.fingerprints import ExpectedModel
from scheduler_svc.links.recorder import PlanRecorder, RecordingSettings
from scheduler_svc.links.session import SessionSettings
from scheduler_svc.links.worker_link import LinkParts, LinkSettings, WorkerLink
from scheduler_svc.loop import CoreLoop
from scheduler_svc.metrics import CoreMetrics, LinkMetrics, create_metrics
from scheduler_svc.text.grammar_setup import grammar_greeting

_logger = logging.getLogger(__name__)

# What a stop may take beside the time edges are given to finish streams in.
_STOP_MARGIN_S = 5.0
_FLUSH_S = 1.0
_CORE_NAMES = MappingProxyType(
    {"first_new_token_ratio": "new_token_ratio_start", "least_new_token_ratio": "new_token_ratio_floor"}
)
"""Settings whose name ends in their unit, and the core's own name."""


async def run_core(config: SchedulerConfig) -> int:
    """Run the core process until it is told to stop, or fails; returns its exit code.

    Raises:
        EngineError: the model folder or the epoch file cannot be used.
    """
    folder = read_model_folder(config.model.folder)
    card = folder.card
    metrics_server = MetricsServer()
    metrics = create_metrics(metrics_server.registry)
    metrics.describe(model=card.name, architecture=card.architecture, weights=card.weights_fingerprint)
    loop = CoreLoop(core_settings(config.core), metrics=metrics, clock=time.monotonic)
    bridge = BridgeServer(config.process.socket_path, listener=loop, clock=time.monotonic)
    recorder = _recorder(config.recording, card)
    links = _links(config.links, card=card, loop=loop, metrics=metrics, recorder=recorder)
    masks = GrammarMasks(
        grammar_greeting(folder, config.grammar),
        num_processes=config.grammar.grammar_processes,
        post=loop.masks_ready,
        metrics=metrics.grammar,
        clock=time.monotonic,
    )
    loop.connect(links=links, edges=bridge, masks=masks)
    lifecycle = Lifecycle()
    stepping = _Background("core loop", loop.run, lifecycle=lifecycle)
    lifecycle.add(_metrics_part(metrics_server, config))
    if recorder is not None:
        lifecycle.add(_recorder_part(recorder))
    lifecycle.add(Part(name="core loop", start=stepping.start, stop=stepping.stop))
    masking = _Background("grammar masks", masks.run, lifecycle=lifecycle)
    lifecycle.add(Part(name=masking.name, start=masking.start, stop=masking.stop))
    for link in links.values():
        attached = _Background(f"link to {link.worker}", link.run, lifecycle=lifecycle)
        lifecycle.add(Part(name=attached.name, start=attached.start, stop=attached.stop))
    lifecycle.add(_bridge_part(bridge, stepping, drain_timeout_s=config.process.drain_timeout_s))
    install_level_signals(asyncio.get_running_loop())
    return int(await lifecycle.run())


def core_settings(config: CoreConfig) -> CoreSettings:
    """The core's settings; what is unset keeps the core's own default."""
    given = {_CORE_NAMES.get(name, name): value for name, value in config.model_dump().items() if value is not None}
    return CoreSettings(**(given | {"schedule_policy": PolicyKind(config.schedule_policy.value)}))


class _Background:
    """Work that runs from a part's start to its stop; if it fails, the process ends."""

    def __init__(self, name: str, work: Callable[[], Coroutine[Any, Any, None]], *, lifecycle: Lifecycle) -> None:
        self.name = name
        self._work = work
        self._lifecycle = lifecycle
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """False before the start, after the stop and after a failure."""
        return self._task is not None and not self._task.done()

    async def start(self) -> None:
        self._task = asyncio.create_task(self._guarded(), name=self.name)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _guarded(self) -> None:
        try:
            with fault_border(self.name):
                await self._work()
        except EngineError as error:
            self._lifecycle.request_stop(f"{self.name}: {error.reason}", ExitCode.FAULT)


def _links(
    config: LinksConfig, *, card: ModelCard, loop: CoreLoop, metrics: CoreMetrics, recorder: PlanRecorder | None
) -> dict[str, WorkerLink]:
    settings = LinkSettings(
        session=SessionSettings(
            open_timeout_s=config.open_timeout_s,
            plan_timeout_s=config.plan_timeout_s,
            report_interval_ms=config.report_interval_ms,
            report_lost_s=config.report_lost_s,
        ),
        attach_timeout_s=config.attach_timeout_s,
        reattach_min_s=config.reattach_min_s,
        reattach_max_s=config.reattach_max_s,
        scheduler_name=f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}",
    )
    epoch = _epoch_source(config)
    expected = ExpectedModel(name=card.name, tokenizer_fingerprint=card.tokenizer_fingerprint)
    links = {}
    for worker in config.workers:
        parts = LinkParts(
            listener=loop,
            metrics=LinkMetrics(metrics.plans, metrics.workers, worker),
            epoch=epoch,
            expected=expected,
            open_channel=plan_channel,
            clock=time.monotonic,
            recorder=recorder,
        )
        links[worker] = WorkerLink(worker, settings=settings, parts=parts)
    return links


def _recorder(config: RecordingConfig, card: ModelCard) -> PlanRecorder | None:
    if config.record is None:
        return None
    settings = RecordingSettings(
        path=config.record,
        max_file_bytes=config.record_bytes,
        max_files=config.record_files,
        model=card.name,
        weights_fingerprint=card.weights_fingerprint,
    )
    return PlanRecorder(settings)


def _recorder_part(recorder: PlanRecorder) -> Part:
    async def start() -> None:
        recorder.start()

    async def stop() -> None:
        await asyncio.to_thread(recorder.stop)

    return Part(name="plan recorder", start=start, stop=stop)


def _epoch_source(config: LinksConfig) -> EpochSource:
    if config.epoch_source is EpochSourceKind.FILE:
        assert config.epoch_file is not None, "checked by the settings"
        return FileEpoch(config.epoch_file)
    return WorkersEpoch()


def _metrics_part(server: MetricsServer, config: SchedulerConfig) -> Part:
    async def start() -> None:
        port = server.start(config.observability.metrics_host, config.observability.metrics_port)
        _logger.info("metrics", extra={"port": port})

    async def stop() -> None:
        await asyncio.to_thread(server.stop)

    return Part(name="metrics", start=start, stop=stop)


def _bridge_part(bridge: BridgeServer, stepping: _Background, *, drain_timeout_s: float) -> Part:
    async def stop() -> None:
        if stepping.is_running:
            await bridge.edges_gone(timeout_s=drain_timeout_s)
        else:
            await bridge.flushed(timeout_s=_FLUSH_S)
        await bridge.close()

    return Part(name="bridge", start=bridge.start, stop=stop, stop_limit_s=drain_timeout_s + _STOP_MARGIN_S)
