"""Everything of a worker that exists only once its executor is loaded, from the load to the release of the device."""

import logging
import time
from collections.abc import Callable

from protos.service.tracing import Tracing
from protos.wire.worker_info import WorkerInfo
from worker_svc.executor import CapturingExecutor, Executor
from worker_svc.metrics import DeviceNanoseconds, MemoryKind, StartupStage, WorkerMetrics
from worker_svc.rpc.capture_work import CaptureWork
from worker_svc.rpc.device_thread import DeviceThread
from worker_svc.rpc.device_work import DeviceProgress, DeviceWork
from worker_svc.rpc.plan_intake import PlanIntake
from worker_svc.rpc.plan_observer import PlanObserver
from worker_svc.rpc.protocol_loop import LoopParts, ProtocolLoop
from worker_svc.rpc.watchdog import DeviceWatchdog

_logger = logging.getLogger(__name__)


class LoadedWorker:
    """Made by `load`; `release` ends it, once."""

    def __init__(self, loop: ProtocolLoop, *, info: WorkerInfo, work: DeviceWork, device: DeviceThread) -> None:
        self.loop = loop
        self.info = info
        self.work = work
        self.intake = PlanIntake(info, time.monotonic_ns, work.stage)
        self._device = device
        self._watchdog = DeviceWatchdog(lambda: work.progress)
        self._watchdog.start()

    async def release(self) -> None:
        """Finish the running plan, end the streams, let go of the device."""
        self._device.end_spare()
        try:
            await self.loop.stop("the worker is leaving")
            await self._device.submit(self.work.close)
        finally:
            self._watchdog.stop()


async def load(
    device: DeviceThread, build: Callable[[], Executor], metrics: WorkerMetrics, tracing: Tracing | None = None
) -> LoadedWorker:
    """Build the executor on the device thread, so that whatever it makes belongs to that thread.

    Raises:
        EngineError: the model or a setting cannot be used.
    """
    began = time.monotonic()
    info, work = await device.submit(lambda: _build(build, device))
    seconds = time.monotonic() - began
    loop = ProtocolLoop(LoopParts(info=info, device=device, work=work, observer=PlanObserver(metrics, tracing)))
    _describe(info, work, metrics)
    metrics.process.startup_seconds.labels(StartupStage.LOAD).set(seconds)
    _log(info, seconds)
    return LoadedWorker(loop, info=info, work=work, device=device)


def _build(build: Callable[[], Executor], device: DeviceThread) -> tuple[WorkerInfo, DeviceWork]:
    executor = build()
    work = DeviceWork(executor, time.monotonic_ns)
    if isinstance(executor, CapturingExecutor) and executor.captures is not None:
        device.set_spare(CaptureWork(executor.captures, work))
    return executor.worker_info(), work


def _describe(info: WorkerInfo, work: DeviceWork, metrics: WorkerMetrics) -> None:
    metrics.describe(device=info.device, dtype=info.dtype, numerics=info.numerics, kernels=info.kernels)
    metrics.process.weights.info(
        {
            "model": info.model_name,
            "weights": info.fingerprints.weights,
            "tokenizer": info.fingerprints.tokenizer,
            "kv_layout": info.fingerprints.kv_layout,
        }
    )
    kv_bytes = sum(pool.num_pages * pool.bytes_per_page for pool in info.sub_pools)
    metrics.process.memory_bytes.labels(MemoryKind.KV).set(kv_bytes)
    if work.memory is not None:
        metrics.read_memory(work.memory.weights_bytes, work.memory.free_bytes)
    metrics.read_device_time(lambda: _device_ns(work.progress))
    metrics.read_captures(work.captures)


def _device_ns(progress: DeviceProgress) -> DeviceNanoseconds:
    return DeviceNanoseconds(busy=progress.busy_ns, idle=progress.idle_ns, bubble=progress.bubble_ns)


def _log(info: WorkerInfo, seconds: float) -> None:
    _logger.info(
        "worker loaded",
        extra={
            "model": info.model_name,
            "device": info.device,
            "dtype": info.dtype,
            "numerics": info.numerics,
            "kernels": info.kernels,
            "pages": [pool.num_pages for pool in info.sub_pools],
            "max_rows": info.limits.max_rows,
            "max_tokens": info.limits.max_tokens,
            "context_tokens": info.limits.context_tokens,
            "window": info.limits.window,
            "seconds": round(seconds, 3),
            "graphs_to_capture": {entry.phase.name.lower(): entry.sizes for entry in info.buckets},
        },
    )
