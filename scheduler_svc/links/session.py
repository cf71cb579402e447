"""One term of one worker: the open plan stream, its results and its reports, from Attach until the worker is lost.

Knows nothing of attaching again. Guards: results reach the core in seq order, and none after `run` returned.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol

from protos.wire.enums import WorkerState
from protos.wire.errors import DataFault, DeviceFault, EngineError, SyncError, UnavailableError, WrongIncarnation
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from protos.wire.worker_info import Buckets, WorkerInfo
from scheduler_svc.core.events import BucketsChanged, ResultReceived, WorkerAttached, WorkerEvent, WorkerLost
from scheduler_svc.links.liveness import Liveness
from scheduler_svc.links.recorder import PlanRecorder
from scheduler_svc.links.statistics import InFlight, LinkCounts, worker_seconds
from scheduler_svc.links.unanswered import MIN_DELTA_BYTES, UnansweredPlans
from scheduler_svc.links.worker_calls import (
    DrainAnnounced,
    EncodedPlan,
    FullPlanNeeded,
    LinkNack,
    PlansMissing,
    PlanStream,
    Term,
    WorkerCalls,
)
from scheduler_svc.metrics import LinkMetrics

# A watch that wakes this much too late was held up by its own process, so it says nothing of the worker.
_OWN_STALL_S = 0.25


class LinkListener(Protocol):
    """What a link tells. Called on the event loop; must not wait."""

    def worker_event(self, event: WorkerEvent) -> None:
        """Something the scheduling core must know, in order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Limits of one session."""

    open_timeout_s: float
    plan_timeout_s: float
    report_interval_ms: int
    report_lost_s: float
    min_delta_bytes: int = MIN_DELTA_BYTES
    """Plans that are smaller in full are sent in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParts:
    """What outlives a session; made by the link."""

    listener: LinkListener
    recorder: PlanRecorder | None = None
    metrics: LinkMetrics
    counts: LinkCounts
    settings: SessionSettings
    clock: Callable[[], float]


class WorkerSession:
    """Made by the link after an attach, discarded when `run` returns."""

    def __init__(self, calls: WorkerCalls, *, term: Term, parts: SessionParts) -> None:
        self.state = WorkerState.SERVING
        self._calls = calls
        self._term = term
        self._parts = parts
        self._buckets = term.info.buckets
        self._in_flight = InFlight()
        self._unanswered = UnansweredPlans(term.info, min_delta_bytes=parts.settings.min_delta_bytes)
        self._outgoing: asyncio.Queue[EncodedPlan] = asyncio.Queue()
        settings = parts.settings
        self._liveness = Liveness(
            report_lost_s=settings.report_lost_s, plan_timeout_s=settings.plan_timeout_s, now=parts.clock()
        )

    @property
    def info(self) -> WorkerInfo:
        """What the worker said of itself at Attach, with the buckets of its last report."""
        return replace(self._term.info, buckets=self._buckets)

    @property
    def num_in_flight(self) -> int:
        """Plans without a result."""
        return len(self._in_flight)

    def send(self, plan: ForwardPlan) -> None:
        """Encode `plan` and queue it; plans leave in this order. The core's window bounds the queue."""
        metrics = self._parts.metrics
        if self._parts.recorder is not None:
            self._parts.recorder.plan_sent(self._term.worker, plan)
        begun = self._parts.clock()
        message = self._unanswered.add(plan)
        now = self._parts.clock()
        metrics.plans.encode_seconds.observe(now - begun)
        metrics.plans.plan_bytes.labels("delta" if message.is_delta else "full").observe(len(message.body))
        self._parts.counts.sent(rows=plan.rows.num_rows, size=len(message.body))
        self._in_flight.add(message.seq, now)
        self._liveness.plan_sent(message.seq, budget_s=plan.identity.budget_ms / 1000, now=now)
        metrics.set_in_flight(len(self._in_flight))
        self._outgoing.put_nowait(message)

    async def run(self) -> EngineError:
        """Serve the term until it ends; returns why. Tells the listener of both ends, if the stream opened at all."""
        stream = self._calls.execute()
        try:
            refusal = await _reason(self._open(stream))
            if refusal is not None:
                return refusal
            term = self._term
            self._parts.metrics.set_state(self.state)
            if self._parts.recorder is not None:
                self._parts.recorder.attached(term.worker, epoch=term.epoch, term=term.term, info=term.info)
            self._parts.listener.worker_event(WorkerAttached(term.worker, term.info, term.epoch, term.term))
            try:
                return await self._serve(stream)
            finally:
                self._parts.metrics.set_state(None)
                self._parts.metrics.set_in_flight(0)
                self._parts.listener.worker_event(WorkerLost(term.worker))
        finally:
            stream.close()

    async def _open(self, stream: PlanStream) -> None:
        async with asyncio.timeout(self._parts.settings.open_timeout_s):
            await stream.open(self._term)

    async def _serve(self, stream: PlanStream) -> EngineError:
        """Run the four sides of the term until the first of them ends; returns its reason."""
        sides = (self._write(stream), self._read(stream), self._follow_reports(), self._watch())
        tasks = [asyncio.create_task(_reason(side)) for side in sides]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        reasons = [task.result() for task in tasks if task in done]
        return next((reason for reason in reasons if reason is not None), UnavailableError("the plan stream ended"))

    async def _write(self, stream: PlanStream) -> None:
        while True:
            message = await self._outgoing.get()
            async with asyncio.timeout(self._parts.settings.open_timeout_s):
                await stream.write(message)

    async def _read(self, stream: PlanStream) -> None:
        while True:
            match await stream.read():
                case ForwardResult() as result:
                    self._consume(result)
                case DrainAnnounced():
                    self._set_state(WorkerState.DRAINING)
                case FullPlanNeeded(seq):
                    self._nacked("need_full")
                    self._resend(self._unanswered.in_full(seq))
                case PlansMissing(expected_seq, _):
                    self._nacked("gap")
                    self._resend(self._unanswered.again(expected_seq))
                case LinkNack(kind):
                    self._nacked(kind)
                    message = f"the worker answered {kind} instead of a result"
                    raise SyncError(message)

    def _nacked(self, kind: str) -> None:
        self._parts.metrics.plans.nacks.labels(kind).inc()

    def _resend(self, messages: list[EncodedPlan]) -> None:
        """Send plans once more under their seqs; the core hears nothing of it."""
        for message in messages:
            self._parts.metrics.plans.resends.inc()
            self._outgoing.put_nowait(message)

    def _consume(self, result: ForwardResult) -> None:
        seq = result.identity.seq
        due = self._in_flight.oldest()
        if due is None or seq < due or not self._is_current(result):
            self._parts.metrics.plans.late_results.inc()
            return
        if seq != due:
            message = f"the worker answered plan {seq} when plan {due} was due"
            raise DataFault(message, field="seq", plan_seq=seq)
        now = self._parts.clock()
        rtt_s = self._in_flight.pop(seq, now)
        self._unanswered.answered(seq, was_refused=result.rejection is not None)
        self._liveness.plan_answered(seq, now=now)
        self._parts.counts.answered(result)
        self._parts.metrics.plan_answered(rtt_s=rtt_s, worker_s=worker_seconds(result.timings))
        self._parts.metrics.set_in_flight(len(self._in_flight))
        if self._parts.recorder is not None:
            self._parts.recorder.result_received(self._term.worker, result)
        if result.rejection is not None:
            self._nacked("rejected")
        self._parts.listener.worker_event(ResultReceived(self._term.worker, result))

    def _is_current(self, result: ForwardResult) -> bool:
        identity, term = result.identity, self._term
        return (identity.epoch, identity.term, identity.incarnation) == (term.epoch, term.term, term.info.incarnation)

    async def _follow_reports(self) -> None:
        async for report in self._calls.reports(interval_ms=self._parts.settings.report_interval_ms):
            if report.incarnation != self._term.info.incarnation:
                raise WrongIncarnation("the worker was restarted", field="incarnation")
            self._liveness.reported(
                counter=report.device_counter, capture_budget_s=report.capture_budget_s, now=self._parts.clock()
            )
            if report.state is not None:
                self._set_state(report.state)
            self._follow_buckets(report.buckets)
        raise UnavailableError("the worker ended its report stream", field="report")

    def _follow_buckets(self, reported: tuple[Buckets, ...]) -> None:
        # A worker without the field reports none: what it said at Attach holds.
        if reported and reported != self._buckets:
            self._buckets = reported
            self._parts.listener.worker_event(BucketsChanged(self._term.worker, reported))

    def _set_state(self, state: WorkerState) -> None:
        if state is not self.state:
            self.state = state
            self._parts.metrics.set_state(state)
        if state is WorkerState.FAILED:
            raise DeviceFault("the worker reports that its device failed", field="state")

    async def _watch(self) -> None:
        """Ask for the verdict when it may change. No sleep is longer than the time a report may be late."""
        while True:
            due = self._liveness.next_check()
            await asyncio.sleep(max(0.0, due - self._parts.clock()))
            now = self._parts.clock()
            if now - due > _OWN_STALL_S:
                self._liveness.forgive(now)
                continue
            verdict = self._liveness.verdict(now)
            if verdict is not None:
                raise verdict


async def _reason(side: Coroutine[Any, Any, None]) -> EngineError | None:
    """Why `side` ended, as an error of the taxonomy; anything that is not one is a bug and passes."""
    try:
        await side
    except EngineError as error:
        return error
    except TimeoutError:
        return UnavailableError("the worker did not take or answer a message in time")
    return None
