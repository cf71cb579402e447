"""The two sides of the split-tax bench: a core with its executor in this process, and a core over gRPC to a worker.

Neither has an edge or a client: requests are submitted to the core, and it is done when every one has ended.
"""

import asyncio
import time
from collections import deque

from prometheus_client import CollectorRegistry

from protos.service.channel import plan_channel
from protos.wire.plan import ForwardPlan
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.events import (
    Event,
    RequestFinished,
    RequestSpec,
    RequestSubmitted,
    ResultReceived,
    SendPlan,
    WorkerAttached,
    WorkerEvent,
    WorkerLost,
)
from scheduler_svc.core.scheduler import step
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.links.epoch import WorkersEpoch
from scheduler_svc.links.fingerprints import ExpectedModel
from scheduler_svc.links.session import SessionSettings
from scheduler_svc.links.worker_link import LinkParts, LinkSettings, WorkerLink
from scheduler_svc.metrics import LinkMetrics, create_metrics
from worker_svc.executor import Executor

WORKER = "w0"
SESSION = SessionSettings(
    open_timeout_s=10.0, plan_timeout_s=60.0, report_interval_ms=250, report_late_s=30.0, report_lost_s=30.0
)


class OneProcess:
    """Core and executor turn by turn: one plan in flight, no bytes, no threads between."""

    def __init__(self, executor: Executor, info: WorkerInfo) -> None:
        self._executor = executor
        self._info = info

    def run(self, specs: list[RequestSpec]) -> float:
        """Seconds until every request has ended."""
        self._executor.reset()
        state = SchedulerState.create(CoreSettings())
        step(state, [WorkerAttached(WORKER, self._info, 1, 1)], time.monotonic())
        begin = time.perf_counter()
        events: list[Event] = [RequestSubmitted(spec) for spec in specs]
        plans: deque[ForwardPlan] = deque()
        left = len(specs)
        while left:
            out = step(state, events, time.monotonic())
            plans.extend(instruction.plan for instruction in out if isinstance(instruction, SendPlan))
            left -= sum(isinstance(instruction, RequestFinished) for instruction in out)
            events = [ResultReceived(WORKER, self._executor.execute(plans.popleft()))] if plans else []
        return time.perf_counter() - begin


class OverGrpc:
    """A core in this process, its worker behind the plan stream. A listener of its link."""

    def __init__(self, address: str, expected: ExpectedModel) -> None:
        metrics = create_metrics(CollectorRegistry())
        settings = LinkSettings(
            session=SESSION, attach_timeout_s=60.0, reattach_min_s=0.1, reattach_max_s=1.0, scheduler_name="bench"
        )
        self._events: list[Event] = []
        self._wake = asyncio.Event()
        self._is_leaving = False
        self._state = SchedulerState.create(CoreSettings())
        self._link = WorkerLink(
            WORKER,
            settings=settings,
            parts=LinkParts(
                listener=self,
                metrics=LinkMetrics(metrics.plans, metrics.workers, WORKER),
                epoch=WorkersEpoch(),
                expected=expected,
                open_channel=lambda _: plan_channel(address),
                clock=time.monotonic,
            ),
        )

    def worker_event(self, event: WorkerEvent) -> None:
        assert self._is_leaving or not isinstance(event, WorkerLost), "the worker was lost"
        self._events.append(event)
        self._wake.set()

    def worker_fenced(self, worker, error) -> None:
        raise AssertionError(error)

    async def __aenter__(self) -> "OverGrpc":
        self._running = asyncio.create_task(self._link.run())
        while not self._events:
            await self._wake.wait()
            self._wake.clear()
        return self

    async def __aexit__(self, *_) -> None:
        self._is_leaving = True
        self._running.cancel()
        await asyncio.wait({self._running})

    async def run(self, specs: list[RequestSpec]) -> float:
        """Seconds until every request has ended."""
        begin = time.perf_counter()
        self._events += [RequestSubmitted(spec) for spec in specs]
        left = len(specs)
        while left:
            events, self._events = self._events, []
            for instruction in step(self._state, events, time.monotonic()):
                if isinstance(instruction, SendPlan):
                    self._link.send(instruction.plan)
                left -= isinstance(instruction, RequestFinished)
            if left and not self._events:
                await self._wake.wait()
                self._wake.clear()
        return time.perf_counter() - begin
