"""A worker process in order: its ports, then the load; backwards at its end. Free of torch.

The port answers from the first moment: until the executor is loaded, health says NOT_SERVING and Attach says LOADING.
"""

import asyncio
import contextlib
from collections.abc import Callable

from protos.service.lifecycle import ExitCode, Lifecycle, Part
from protos.service.logs import install_level_signals
from protos.wire.enums import WorkerState
from worker_svc.config import ServerConfig
from worker_svc.executor import Executor
from worker_svc.metrics import MemoryKind, create_metrics
from worker_svc.rpc.device_thread import DeviceThread
from worker_svc.rpc.listeners import Listeners
from worker_svc.rpc.loaded_worker import LoadedWorker, load
from worker_svc.rpc.reports import Reporter
from worker_svc.rpc.worker_servicer import WorkerServicer
from worker_svc.rpc.worker_status import WorkerStatus

_STOP_MARGIN_S = 5.0
_ABANDONED_LOAD_S = 0.2


class WorkerService:
    """One run of one worker. Made and used in one event loop, by a composition root that says how to build."""

    def __init__(
        self,
        build: Callable[[], Executor],
        listeners: Listeners,
        server: ServerConfig,
    ) -> None:
        self.lifecycle = Lifecycle()
        self.listeners = listeners
        self._build = build
        self._config = server
        self._metrics = create_metrics(self.listeners.registry, self.listeners.buckets)
        self._status = WorkerStatus(self.listeners.health)
        self._reporter = Reporter(self._status)
        self._servicer = WorkerServicer(self._status, self._reporter)
        self._device: DeviceThread | None = None
        self._worker: LoadedWorker | None = None

    async def run(self) -> ExitCode:
        """Serve until a signal, a failure or `lifecycle.request_stop`; the code to exit with."""
        resident_bytes = self._metrics.process.memory_bytes.labels(MemoryKind.RESIDENT)
        for part in self.listeners.parts(self._servicer, resident_bytes):
            self.lifecycle.add(part)
        executor = Part(
            name="executor",
            start=self._load,
            stop=self._release,
            start_limit_s=self._config.load_timeout_s,
            stop_limit_s=self._config.drain_timeout_s + _STOP_MARGIN_S,
        )
        self.lifecycle.add(executor)
        install_level_signals(asyncio.get_running_loop())
        return await self.lifecycle.run()

    async def _load(self) -> None:
        self._device = DeviceThread()
        worker = await load(self._device, self._build, self._metrics, self.listeners.tracing)
        self._worker = worker
        self._reporter.watch(worker.info, worker.work)
        self._servicer.serve(worker.loop, worker.intake)
        await self._status.set(WorkerState.SERVING)
        self.lifecycle.spawn("device", self._until_failure(worker))

    async def _until_failure(self, worker: LoadedWorker) -> None:
        error = await worker.loop.failure
        await self._status.set(WorkerState.FAILED)
        raise error

    async def _release(self) -> None:
        await self._status.drain()
        try:
            if self._worker is not None:
                await self._worker.release()
        finally:
            self._status.is_leaving.set()
        if self._device is not None:
            await self._end_thread(self._device)

    async def _end_thread(self, device: DeviceThread) -> None:
        """An abandoned load is not waited for: it cannot be interrupted, and its thread dies with the process."""
        limit_s = None if self._worker is not None else _ABANDONED_LOAD_S
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(device.stop(), limit_s)
