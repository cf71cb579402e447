"""The heartbeat: what the device thread last said of itself, sent at a fixed interval.

Guards: nothing here advances a counter, so a report moves only when the device does.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import psutil

from protos.forwardplane.v1 import worker_pb2
from protos.forwardplane.v1.worker_pb2 import WorkerReport
from protos.wire.codec import buckets_to_proto
from protos.wire.enums import WorkerState
from protos.wire.worker_info import WorkerInfo
from worker_svc.executor import CaptureProgress
from worker_svc.rpc.device_work import DeviceProgress, DeviceWork
from worker_svc.rpc.worker_status import WorkerStatus

DEFAULT_INTERVAL_MS = 250
MIN_INTERVAL_MS = 10
MAX_INTERVAL_MS = 10_000
IDLE_FACTOR = 3
"""Intervals between reports of a device that did nothing: a report costs both sides a millisecond in gRPC's threads."""
_NS_PER_MS = 1_000_000


class Reporter:
    """One per process; each report stream is one `reports` iteration. Before `watch` it reports an empty device."""

    def __init__(self, status: WorkerStatus, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._status = status
        self._clock_ns = clock_ns
        self._process = psutil.Process()
        self._device: tuple[WorkerInfo, DeviceWork] | None = None

    def watch(self, info: WorkerInfo, work: DeviceWork) -> None:
        """The worker is loaded: report this device from now on."""
        self._device = (info, work)

    async def reports(self, interval_ms: int) -> AsyncIterator[WorkerReport]:
        """A report now and every interval (0: the default), every third one while idle, until the worker leaves."""
        interval_s = min(max(interval_ms or DEFAULT_INTERVAL_MS, MIN_INTERVAL_MS), MAX_INTERVAL_MS) / 1000
        last_counter = -1
        while True:
            report = self.report()
            yield report
            if self._status.is_leaving.is_set():
                return
            is_idle = report.device_counter == last_counter and report.plan_age_ms == 0
            last_counter = report.device_counter
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._status.is_leaving.wait(), interval_s * (IDLE_FACTOR if is_idle else 1))

    def report(self) -> WorkerReport:
        """The worker at this moment."""
        progress = DeviceProgress() if self._device is None else self._device[1].progress
        captures = CaptureProgress() if self._device is None else self._device[1].captures()
        age_ns = self._clock_ns() - progress.since_ns if progress.is_busy else 0
        report = WorkerReport(
            epoch=progress.fence.epoch,
            term=progress.fence.term,
            state=state_message(self._state(captures)),
            last_started_seq=progress.last_started_seq,
            last_finished_seq=progress.last_finished_seq,
            device_counter=progress.device_counter,
            plan_age_ms=age_ns // _NS_PER_MS,
            capture_budget_ms=progress.capture_budget_ms,
            nan_rows=progress.nan_rows,
            canary_hits=progress.canary_hits,
            resident_bytes=self._process.memory_info().rss,
            free_device_bytes=psutil.virtual_memory().available,
            buckets=buckets_to_proto(captures.buckets),
        )
        if self._device is not None:
            report.incarnation = self._device[0].incarnation
        return report

    def current(self, info: WorkerInfo) -> WorkerInfo:
        """`info` with the buckets that can be replayed now."""
        return info if self._device is None else replace(info, buckets=self._device[1].captures().buckets)

    def _state(self, captures: CaptureProgress) -> WorkerState:
        """CAPTURING is a way of serving."""
        state = self._status.state
        return WorkerState.CAPTURING if state is WorkerState.SERVING and not captures.is_done else state


def state_message(state: WorkerState) -> "worker_pb2.WorkerState.ValueType":
    """`state` as messages carry it."""
    return worker_pb2.WorkerState.Value(f"WORKER_STATE_{state.name}")
