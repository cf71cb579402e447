"""The ports of a worker (metrics, health, gRPC) and its traces. Knows neither executors nor the ordering protocol."""

import asyncio
import logging

import grpc
import psutil
from prometheus_client import CollectorRegistry, Gauge

from protos.forwardplane.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from protos.service.access import AccessInterceptor, PeerRoles, admit_everybody
from protos.service.credentials import server_credentials
from protos.service.lifecycle import Part
from protos.service.metrics import MetricsServer
from protos.service.security_config import TlsConfig, open_revoked_peers, open_tls_folder
from protos.service.server import HealthServer, PortProfile, ServerOptions, add_reflection, bind_port, build_server
from protos.service.status import StatusInterceptor
from protos.service.tracing import open_tracing, tracing_part
from worker_svc.config import ObservabilityConfig, ServerConfig
from worker_svc.rpc.worker_servicer import WorkerServicer
from worker_svc.rpc.worker_status import SERVICE_NAME

_logger = logging.getLogger(__name__)

_CALLS_END_S = 0.5
_PLAIN = TlsConfig()


class Listeners:
    """Made and used in one event loop, from start to stop of the process."""

    def __init__(self, server: ServerConfig, observability: ObservabilityConfig, tls: TlsConfig = _PLAIN) -> None:
        self.health = HealthServer((SERVICE_NAME,))
        self.port = 0
        """The gRPC port, once bound."""
        self._config = server
        self._observability = observability
        self._tls = tls
        self.tracing = open_tracing(observability.traces(), service="forwardplane-worker")
        """None: off."""
        self.buckets = observability.buckets()
        """Of the histograms."""
        self._metrics = MetricsServer()
        self._server: grpc.aio.Server | None = None
        self._servicer: WorkerServicer | None = None

    @property
    def registry(self) -> CollectorRegistry:
        """Where the metrics of this process belong."""
        return self._metrics.registry

    def parts(self, servicer: WorkerServicer, resident_bytes: Gauge) -> tuple[Part, ...]:
        """All ports, in start order.

        Args:
            servicer: answers on the gRPC port.
            resident_bytes: set at each scrape.
        """
        self._servicer = servicer
        process = psutil.Process()
        resident_bytes.set_function(lambda: process.memory_info().rss)
        return (
            *(() if self.tracing is None else (tracing_part(self.tracing),)),
            Part(name="metrics", start=self._start_metrics, stop=self._stop_metrics),
            Part(name="health", start=self._start_health, stop=self.health.stop),
            Part(name="gRPC port", start=self._start_server, stop=self._stop_server),
        )

    async def _start_metrics(self) -> None:
        port = self._metrics.start(self._observability.metrics_host, self._observability.metrics_port)
        _logger.info("metrics", extra={"port": port})

    async def _stop_metrics(self) -> None:
        await asyncio.to_thread(self._metrics.stop)

    async def _start_health(self) -> None:
        port = await self.health.start(self._config.host, self._config.health_port)
        _logger.info("health", extra={"port": port})

    async def _start_server(self) -> None:
        assert self._servicer is not None
        files = open_tls_folder(self._tls.tls_dir)
        admit = admit_everybody if files is None else PeerRoles(self._tls.trust_domain)
        server = build_server(
            options=ServerOptions(profile=PortProfile.PLAN, hardened=self._tls.hardened),
            interceptors=(StatusInterceptor(), AccessInterceptor(admit, open_revoked_peers(files))),
        )
        add_WorkerServiceServicer_to_server(self._servicer, server)
        self.health.add_to(server)
        if not self._tls.hardened:
            add_reflection(server, (SERVICE_NAME,))
        credentials = None if files is None else server_credentials(files, needs_client=True)
        self.port = bind_port(server, self._config.host, self._config.port, credentials=credentials)
        await server.start()
        self._server = server
        _logger.info("listening", extra={"port": self.port})

    async def _stop_server(self) -> None:
        if self._server is not None:
            await self._server.stop(_CALLS_END_S)
