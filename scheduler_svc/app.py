"""Composition root of the core process: the one place that constructs the loop, the bridge and the links."""

import asyncio
import importlib.util
import logging
import os
import pkgutil
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import grpc
from prometheus_client import Gauge

from protos.service.channel import plan_channel
from protos.service.credentials import channel_security
from protos.service.lifecycle import ExitCode, Lifecycle, Part, exit_code_of
from protos.service.logs import install_level_signals
from protos.service.metrics import MetricsServer
from protos.service.model_files import ModelCard, read_model_folder
from protos.service.security_config import open_tls_folder
from protos.service.status import fault_border
from protos.service.tracing import open_tracing, tracing_part
from protos.wire.errors import EngineError, InvalidRequest, SyncError
from scheduler_svc.bridge.server import BridgeServer
from scheduler_svc.cluster_config import ClusterConfig
from scheduler_svc.config import CoreConfig, EpochSourceKind, LinksConfig, RecordingConfig, SchedulerConfig
from scheduler_svc.core.settings import CoreSettings, PolicyKind
from scheduler_svc.grammar_masks import GrammarMasks
from scheduler_svc.links.epoch import EpochSource, FileEpoch, WorkersEpoch
from scheduler_svc.links.fingerprints import ExpectedModel
from scheduler_svc.links.kubernetes_epoch import RaisedEpoch
from scheduler_svc.links.lease import LeaseKeeper, LeaseSettings
from scheduler_svc.links.recorder import PlanRecorder, RecordingSettings
from scheduler_svc.links.session import SessionSettings
from scheduler_svc.links.worker_directory import DirectoryParts, Lookup, WorkerDirectory
from scheduler_svc.links.worker_link import LinkParts, LinkSettings, WorkerLink
from scheduler_svc.loop import CoreLoop
from scheduler_svc.metrics import CoreMetrics, LinkMetrics, create_metrics
from scheduler_svc.request_traces import RequestTraces
from scheduler_svc.text.grammar_setup import grammar_greeting

if TYPE_CHECKING:
    from scheduler_svc.links.kubernetes_api import KubernetesApi

_logger = logging.getLogger(__name__)

# By name, so that its client is loaded, and needed, only where settings ask for Kubernetes.
_KUBERNETES = "scheduler_svc.links.kubernetes_api"
_KUBERNETES_CLIENT = "kubernetes_asyncio"
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
    metrics = create_metrics(metrics_server.registry, config.observability.buckets())
    metrics.describe(model=card.name, architecture=card.architecture, weights=card.weights_fingerprint)
    tracing = open_tracing(config.observability.traces(), service="forwardplane-scheduler")
    traces = RequestTraces(metrics.requests.queue_seconds, tracing, plan_ratio=config.observability.trace_plan_ratio)
    loop = CoreLoop(core_settings(config.core), metrics=metrics, clock=time.monotonic, traces=traces)
    bridge = BridgeServer(config.process.socket_path, listener=loop, clock=time.monotonic)
    recorder = _recorder(config.recording, card)
    lifecycle = Lifecycle()
    api = _kubernetes_api(config)
    authority = _Authority(api=api, epoch=_epoch_source(config.links, api), lease=_lease(config.cluster, api, metrics))
    directory = WorkerDirectory(
        DirectoryParts(
            make=_link_maker(config, card=card, loop=loop, metrics=metrics, epoch=authority.epoch, recorder=recorder),
            run=lambda link: _Background(f"link to {link.worker}", link.run, lifecycle=lifecycle),
            forget=metrics.forget_worker,
        )
    )
    masks = GrammarMasks(
        grammar_greeting(folder, config.grammar),
        num_processes=config.grammar.grammar_processes,
        post=loop.masks_ready,
        metrics=metrics.grammar,
        clock=time.monotonic,
    )
    loop.connect(links=directory.links, edges=bridge, masks=masks)
    stepping = _Background("core loop", loop.run, lifecycle=lifecycle)
    lifecycle.add(_metrics_part(metrics_server, config))
    if tracing is not None:
        lifecycle.add(tracing_part(tracing))
    if recorder is not None:
        lifecycle.add(_recorder_part(recorder))
    if api is not None:
        lifecycle.add(Part(name="API server", stop=api.close))
    lifecycle.add(Part(name="core loop", start=stepping.start, stop=stepping.stop))
    masking = _Background("grammar masks", masks.run, lifecycle=lifecycle)
    lifecycle.add(Part(name=masking.name, start=masking.start, stop=masking.stop))
    if authority.lease is not None:
        leading = _Background("lease", partial(_lead, authority.lease, loop), lifecycle=lifecycle)
        lifecycle.add(_lease_part(leading, authority.lease))
    workers = partial(_know_workers, config, authority=authority, directory=directory, leader=metrics.workers.leader)
    knowing = _Background("workers", workers, lifecycle=lifecycle)
    lifecycle.add(_workers_part(knowing, directory))
    lifecycle.add(_bridge_part(bridge, stepping, drain_timeout_s=config.process.drain_timeout_s))
    install_level_signals(asyncio.get_running_loop())
    return int(await lifecycle.run())


def core_settings(config: CoreConfig) -> CoreSettings:
    """The core's settings; what is unset keeps the core's own default."""
    given = {_CORE_NAMES.get(name, name): value for name, value in config.model_dump().items() if value is not None}
    return CoreSettings(**(given | {"schedule_policy": PolicyKind(config.schedule_policy.value)}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Authority:
    """What says that this scheduler may serve, and as the how-manieth."""

    api: "KubernetesApi | None"
    epoch: EpochSource
    lease: LeaseKeeper | None


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
            self._failed(error)

    def _failed(self, error: EngineError) -> None:
        extra = {"part": self.name, "reason": error.reason, "field": error.field, "error": error.message}
        _logger.error("a part failed", extra=extra)
        is_input = exit_code_of(error) is ExitCode.BAD_INPUT
        code = ExitCode.BAD_INPUT if is_input else ExitCode.FAULT
        self._lifecycle.request_stop(f"{self.name}: {error.reason}", code)


def _link_maker(
    settings: SchedulerConfig,
    *,
    card: ModelCard,
    loop: CoreLoop,
    metrics: CoreMetrics,
    epoch: EpochSource,
    recorder: PlanRecorder | None,
) -> Callable[[str], WorkerLink]:
    config = settings.links
    limits = LinkSettings(
        session=SessionSettings(
            open_timeout_s=config.open_timeout_s,
            plan_timeout_s=config.plan_timeout_s,
            report_interval_ms=config.report_interval_ms,
            report_late_s=config.report_late_s,
            report_lost_s=config.report_lost_s,
        ),
        attach_timeout_s=config.attach_timeout_s,
        reattach_min_s=config.reattach_min_s,
        reattach_max_s=config.reattach_max_s,
        scheduler_name=f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}",
    )
    files = open_tls_folder(settings.tls.tls_dir)

    def open_channel(worker: str) -> grpc.aio.Channel:
        if files is None:
            return plan_channel(worker)
        return plan_channel(worker, channel_security(files.current(), server_name=settings.tls.worker_name))

    expected = ExpectedModel(name=card.name, tokenizer_fingerprint=card.tokenizer_fingerprint)

    def make(worker: str) -> WorkerLink:
        parts = LinkParts(
            listener=loop,
            metrics=LinkMetrics(metrics.plans, metrics.workers, worker),
            epoch=epoch,
            expected=expected,
            open_channel=open_channel,
            certificates=None if files is None else files.current,
            clock=time.monotonic,
            recorder=recorder,
        )
        return WorkerLink(worker, settings=limits, parts=parts)

    return make


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


def _kubernetes_api(config: SchedulerConfig) -> "KubernetesApi | None":
    """The API server, where settings ask for it.

    Raises:
        InvalidRequest: its client is not installed, or settings do not say where it is.
    """
    cluster = config.cluster
    if cluster.worker_service is None and config.links.epoch_source is not EpochSourceKind.KUBERNETES:
        return None
    if importlib.util.find_spec(_KUBERNETES_CLIENT) is None:
        raise InvalidRequest("Kubernetes needs an optional package: pip install 'forwardplane[kubernetes]'")
    module = pkgutil.resolve_name(_KUBERNETES)
    settings = module.ClusterSettings(
        url=cluster.cluster_url, namespace=cluster.cluster_namespace, timeout_s=cluster.cluster_timeout_s
    )
    api: KubernetesApi = module.KubernetesApi(settings)
    return api


def _epoch_source(config: LinksConfig, api: "KubernetesApi | None") -> EpochSource:
    if config.epoch_source is EpochSourceKind.FILE:
        assert config.epoch_file is not None, "checked by the settings"
        return FileEpoch(config.epoch_file)
    if config.epoch_source is EpochSourceKind.KUBERNETES:
        assert api is not None, "made for this source"
        assert config.epoch_object is not None, "checked by the settings"
        return RaisedEpoch(partial(api.raise_epoch, config.epoch_object))
    return WorkersEpoch()


def _lease(config: ClusterConfig, api: "KubernetesApi | None", metrics: CoreMetrics) -> LeaseKeeper | None:
    if config.lease_object is None:
        return None
    assert api is not None, "checked by the settings: a Lease goes with an epoch of the API server"
    settings = LeaseSettings(
        identity=f"{os.uname().nodename}-{secrets.token_hex(4)}",
        role=config.lease_role,
        duration_s=config.lease_duration_s,
    )
    renewals = metrics.workers.lease_renewals
    return LeaseKeeper(api.lease(config.lease_object), settings, renewals=renewals, clock=time.monotonic)


async def _lead(lease: LeaseKeeper, loop: CoreLoop) -> None:
    """Hold the Lease; once another has it, or is to have it, this scheduler plans no more."""
    try:
        await lease.run()
    except SyncError as error:
        loop.fenced(error)


async def _know_workers(
    config: SchedulerConfig, *, authority: "_Authority", directory: WorkerDirectory, leader: Gauge
) -> None:
    """Once this scheduler may serve: attach to the workers that settings name, or follow their Service's endpoints."""
    if authority.lease is not None:
        await authority.lease.held()
    if isinstance(authority.epoch, RaisedEpoch):
        await authority.epoch.raise_once()
    leader.set(1)
    service = config.cluster.worker_service
    if service is None:
        await directory.set(config.links.workers)
        return
    assert authority.api is not None, "made for this Service"
    lookup: Lookup = partial(authority.api.worker_addresses, service)
    await directory.begin(lookup)
    await directory.follow(lookup, interval_s=config.cluster.discovery_interval_s)


def _lease_part(leading: _Background, lease: LeaseKeeper) -> Part:
    async def stop() -> None:
        await leading.stop()
        await lease.release()

    return Part(name="lease", start=leading.start, stop=stop)


def _workers_part(knowing: _Background, directory: WorkerDirectory) -> Part:
    async def stop() -> None:
        await knowing.stop()
        await directory.close()

    return Part(name="workers", start=knowing.start, stop=stop)


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
