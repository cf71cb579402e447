"""Processes as pods would run them: settings of an overlay's ConfigMap, an address each, probes, and how a pod ends.

What Kubernetes does is done here, in its order and with its delays: the kubelet waits for preStop, sends SIGTERM and
kills after the grace; the endpoints controller hears of it on its own, later.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.client.fetch_model import fetch_model
from protos.client.simulated_model import SIMULATED_MODEL
from tests.support.core_process import ROOT
from tests.support.fake_api_server import FakeApiServer, endpoint_slice
from tests.support.manifest_policy import LEASE, SCHEDULER, SERVICES, STANDBY, WORKER
from tests.support.manifests import Manifest, objects
from tests.support.served import free_ports

START_LIMIT_S = 60.0
ENDPOINTS_LATE_S = 0.5
"""How long the endpoints controller needs, at its worst longer than preStop lasts."""
PRE_STOP_S, DRAIN_S, GRACE_S = 0.2, 15.0, 30.0
MIN_READY_S = 0.5
_PROBE_EVERY_S = 0.05
LEASE_S = 3
_MODULES = {SCHEDULER: "scheduler_svc", STANDBY: "scheduler_svc", WORKER: "worker_svc"}
_PROBED = {**SERVICES, STANDBY: ""}
"""What readiness asks for: a standby is ready when it is warm."""
_CALLERS_ADDRESS = "127.0.0.1"
_STANDBYS_ADDRESS = "127.0.0.2"


@dataclass(eq=False)
class Pod:
    """One process with an address of its own on loopback."""

    name: str
    address: str
    process: asyncio.subprocess.Process

    async def ended(self, limit_s: float) -> int:
        """Its exit code; killed after the limit, as by the kubelet."""
        try:
            async with asyncio.timeout(limit_s):
                return await self.process.wait()
        except TimeoutError:
            self.process.kill()
            return await self.process.wait()


@dataclass
class Cluster:
    """The pods of one namespace, and the endpoints that the API server tells of."""

    folder: Path
    api: FakeApiServer
    manifest: Manifest
    port: int
    health_port: int
    metrics_ports: list[int]
    ready: dict[Pod, bool] = field(default_factory=dict)
    """The workers that have endpoints, and whether they are ready."""
    pods: list[Pod] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)
    """Settings of schedulers beside those of the overlay."""
    _num_workers: int = 0

    @property
    def target(self) -> str:
        return f"{_CALLERS_ADDRESS}:{self.port}"

    @property
    def cell(self) -> str:
        """Both schedulers, as their common Service's name is resolved."""
        return f"ipv4:{_CALLERS_ADDRESS}:{self.port},{_STANDBYS_ADDRESS}:{self.port}"

    async def standby(self) -> Pod:
        """A standby's pod, started."""
        return await self._start(STANDBY, _STANDBYS_ADDRESS)

    async def scheduler(self) -> Pod:
        """A scheduler's pod, started; its callers find it at one address."""
        return await self._start(SCHEDULER, _CALLERS_ADDRESS)

    async def worker(self) -> Pod:
        """A worker's pod with endpoints, ready for as long as the scheduler may need to attach."""
        self._num_workers += 1
        pod = await self._start(WORKER, f"127.0.1.{self._num_workers}")
        self._set_ready(pod, is_ready=False)
        await self.is_ready(pod)
        self._set_ready(pod, is_ready=True)
        await asyncio.sleep(MIN_READY_S)
        return pod

    async def is_ready(self, pod: Pod) -> None:
        """Wait until its readiness probe says so."""
        async with asyncio.timeout(START_LIMIT_S):
            while not await self._says_ready(pod):
                assert pod.process.returncode is None, f"{pod.name} ended with {pod.process.returncode}"
                await asyncio.sleep(_PROBE_EVERY_S)

    async def _says_ready(self, pod: Pod) -> bool:
        """Asked over a new channel, as by the kubelet: one that was refused waits longer and longer."""
        asked = health_pb2.HealthCheckRequest(service=_PROBED[pod.name])
        async with grpc.aio.insecure_channel(f"{pod.address}:{self.health_port}") as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=1)
            except grpc.aio.AioRpcError:
                return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def delete(self, pod: Pod) -> int:
        """As `kubectl delete pod` with its grace; the exit code. Endpoints change after SIGTERM has come."""
        controller = asyncio.create_task(self._forget(pod))
        await asyncio.sleep(PRE_STOP_S)
        pod.process.send_signal(signal.SIGTERM)
        code = await pod.ended(GRACE_S)
        await controller
        return code

    async def kill(self, pod: Pod) -> None:
        """Its node is gone; the endpoints controller finds out later."""
        pod.process.kill()
        await pod.process.wait()
        await self._forget(pod)

    async def close(self) -> None:
        for pod in self.pods:
            if pod.process.returncode is None:
                pod.process.send_signal(signal.SIGTERM)
        for pod in self.pods:
            await pod.ended(GRACE_S)

    async def _start(self, name: str, address: str) -> Pod:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _MODULES[name]),
            env={**os.environ, **self._settings(name), **self._own(name, address)},
            cwd=ROOT,
        )
        pod = Pod(name, address, process)
        self.pods.append(pod)
        return pod

    def _settings(self, name: str) -> dict[str, str]:
        if name == WORKER:
            return self.manifest.settings(name)
        role = {"FORWARDPLANE_LEASE_ROLE": "standby"} if name == STANDBY else {}
        return {**self.manifest.settings(SCHEDULER), **self.extra, **role}

    def _own(self, name: str, address: str) -> dict[str, str]:
        """What differs between pods, and from a cluster: places, ports, and how long things take."""
        metrics, edge_metrics = self.metrics_ports
        values = {
            **{"MODEL_CACHE": str(self.folder), "LOG_LEVEL": "warning"},
            **{"HOST": address, "PORT": str(self.port), "HEALTH_PORT": str(self.health_port)},
            **{"METRICS_HOST": address, "METRICS_PORT": str(metrics), "DRAIN_TIMEOUT_S": str(DRAIN_S)},
        }
        if name != WORKER:
            sockets = self.folder / f"run{len(self.pods)}"
            sockets.mkdir()
            values |= {
                **{"HTTP_PORT": "0", "EDGE_METRICS_PORT": str(edge_metrics), "SOCKET_DIR": str(sockets)},
                **{"CLUSTER_URL": self.api.url, "CLUSTER_NAMESPACE": "forwardplane", "DISCOVERY_INTERVAL_S": "0.1"},
                "RESUME_KEY_FILE": str(self.folder / "keys"),
            }
        else:
            values |= {"SIMULATED_STEP_MS": "5", "GRAPH_MEMORY_FILE": str(self.folder / "graphs.json")}
        return {f"FORWARDPLANE_{key}": value for key, value in values.items()}

    async def _forget(self, pod: Pod) -> None:
        """What the endpoints controller does with a pod that is going, late."""
        await asyncio.sleep(ENDPOINTS_LATE_S)
        if pod in self.ready:
            self._set_ready(pod, is_ready=False)
            await pod.process.wait()
            await asyncio.sleep(ENDPOINTS_LATE_S)
            del self.ready[pod]
            self._publish()

    def _set_ready(self, pod: Pod, *, is_ready: bool) -> None:
        self.ready[pod] = is_ready
        self._publish()

    def _publish(self) -> None:
        endpoints = [(pod.address, is_ready) for pod, is_ready in self.ready.items()]
        service = self.manifest.settings(SCHEDULER)["FORWARDPLANE_WORKER_SERVICE"]
        self.api.slices = [endpoint_slice(service, *endpoints, port=self.port)]


@contextlib.asynccontextmanager
async def cluster(*, workers: int, lease: bool = False) -> AsyncIterator[Cluster]:
    """The overlay `local` with so many workers and one scheduler, all ready; all gone afterwards.

    With `lease` schedulers serve as holders of a Lease only.
    """
    extra = {"FORWARDPLANE_LEASE_OBJECT": LEASE, "FORWARDPLANE_LEASE_DURATION_S": str(LEASE_S)} if lease else {}
    with tempfile.TemporaryDirectory(prefix="pods") as folder:  # of a short name: sockets are made in it
        async with _cluster(Path(folder), workers=workers, extra=extra) as made:
            yield made


@contextlib.asynccontextmanager
async def _cluster(folder: Path, *, workers: int, extra: dict[str, str]) -> AsyncIterator[Cluster]:
    fetch_model(SIMULATED_MODEL, cache=folder)
    (folder / "keys").write_text("ab" * 32 + "\n")
    manifest = Manifest(objects("local"))
    async with FakeApiServer() as api:
        api.add_config_map(manifest.settings(SCHEDULER)["FORWARDPLANE_EPOCH_OBJECT"])
        api.add_lease(LEASE)
        port, health_port, *metrics_ports = free_ports(4)
        made = Cluster(folder, api, manifest, port, health_port, metrics_ports, extra=extra)
        try:
            scheduler = await made.scheduler()
            await asyncio.gather(*(made.worker() for _ in range(workers)))
            await made.is_ready(scheduler)
            yield made
        finally:
            await made.close()
