"""One term of one worker in real time: the plan stream, opened again when the network breaks it, and the reports.

Decides nothing about plans: that is `PlanExchange`. Knows nothing of attaching again. Guards: results reach the core in
the order the exchange gives them, and none after `run` returned.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

from protos.wire.enums import WorkerState
from protos.wire.errors import ConnectionLost, DeviceFault, Draining, EngineError, SyncError, UnavailableError
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from scheduler_svc.core.events import (
    BucketsChanged,
    ResultReceived,
    WorkerAttached,
    WorkerDoubted,
    WorkerEvent,
    WorkerLost,
    WorkerTrusted,
)
from scheduler_svc.links.exchange import Nack, PlanExchange, is_death, may_reopen
from scheduler_svc.links.link_messages import (
    MIN_DELTA_BYTES,
    DrainAnnounced,
    EncodedPlan,
    FullPlanNeeded,
    LinkNack,
    PlansMissing,
    Report,
    Term,
)
from scheduler_svc.links.liveness import Liveness, LivenessLimits
from scheduler_svc.links.recorder import PlanRecorder
from scheduler_svc.links.statistics import LinkCounts, worker_seconds
from scheduler_svc.links.worker_calls import PlanStream, WorkerCalls
from scheduler_svc.metrics import LinkMetrics

_logger = logging.getLogger(__name__)

# A watch that wakes this much too late was held up by its own process, so it says nothing of the worker.
_OWN_STALL_S = 0.25
_LOOK_S = 0.25
_REOPEN_PAUSE_S = 0.05


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
    report_late_s: float
    report_lost_s: float
    reopen_s: float = 2.0
    """How long a broken stream may be tried to be opened again."""
    certificate_check_s: float = 5.0
    """Pause between two looks at the files of certificates."""
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
    certificates: Callable[[], object] | None = None
    new_calls: Callable[[], WorkerCalls]
    """Over a channel of its own, opened with the certificates of the moment."""


class WorkerSession:
    """Made by the link after an attach, discarded when `run` returns."""

    def __init__(self, calls: WorkerCalls, *, term: Term, parts: SessionParts) -> None:
        self.state = WorkerState.SERVING
        self._calls = calls
        self.term = term
        self._parts = parts
        settings = parts.settings
        limits = LivenessLimits(
            report_late_s=settings.report_late_s,
            report_lost_s=settings.report_lost_s,
            plan_timeout_s=settings.plan_timeout_s,
        )
        self._exchange = PlanExchange(
            term,
            liveness=Liveness(limits, now=parts.clock()),
            min_delta_bytes=settings.min_delta_bytes,
            reopen_s=settings.reopen_s,
        )
        self._outgoing: asyncio.Queue[EncodedPlan] | None = None
        """Of the open stream; None while none is."""
        self._is_doubted = False
        self._moved = asyncio.Event()
        """Set once `_calls` are others: what runs on the old ones goes over to them."""

    @property
    def num_in_flight(self) -> int:
        """Plans without a result."""
        return len(self._exchange.in_flight)

    def send(self, plan: ForwardPlan) -> None:
        """Encode `plan` and queue it; plans leave in this order. The core's window bounds the queue."""
        metrics = self._parts.metrics
        if self._parts.recorder is not None:
            self._parts.recorder.plan_sent(self.term.worker, plan)
        begun = self._parts.clock()
        message = self._exchange.send(plan, begun)
        metrics.plans.encode_seconds.observe(self._parts.clock() - begun)
        metrics.plans.plan_bytes.labels("delta" if message.is_delta else "full").observe(len(message.body))
        self._parts.counts.sent(rows=plan.rows.num_rows, size=len(message.body))
        metrics.set_in_flight(self.num_in_flight)
        if self._outgoing is not None:
            self._outgoing.put_nowait(message)

    async def run(self) -> EngineError:
        """Serve the term until it ends; returns why. Tells the listener of both ends, if the stream opened at all."""
        stream = self._calls.execute()
        try:
            await self._open(stream)
        except EngineError as refusal:
            stream.close()
            return refusal
        term, metrics = self.term, self._parts.metrics
        metrics.set_state(self.state)
        if self._parts.recorder is not None:
            self._parts.recorder.attached(term.worker, epoch=term.epoch, term=term.term, info=term.info)
        self._parts.listener.worker_event(WorkerAttached(term.worker, term.info, term.epoch, term.term))
        died, drained = False, False
        try:
            reason = await _first_reason(
                self._converse(stream), self._follow_reports(), self._watch(), self._follow_certificates()
            )
            died, drained = is_death(reason), isinstance(reason, Draining)
            return reason
        finally:
            metrics.set_state(None)
            metrics.set_in_flight(0)
            self._parts.listener.worker_event(WorkerLost(term.worker, died=died, drained=drained))
            await self._calls.close()

    # --- the plan stream

    async def _open(self, stream: PlanStream) -> None:
        opening = self._exchange.next_opening()
        try:
            async with asyncio.timeout(self._parts.settings.open_timeout_s):
                expected_seq = await stream.open(opening.term, stream_number=opening.stream_number)
        except TimeoutError:
            raise ConnectionLost("the worker did not open the plan stream in time") from None
        messages = self._exchange.opened(expected_seq, self._parts.clock())
        self._outgoing = asyncio.Queue()
        self._resend(messages)

    async def _converse(self, stream: PlanStream) -> None:
        """Serve stream after stream until the term is over; raises why."""
        while True:
            try:
                reason = await _first_reason(self._write(stream), self._read(stream), self._until_moved())
            finally:
                stream.close()
                self._outgoing = None
            stream = await self._reopened(reason)

    async def _reopened(self, reason: EngineError) -> PlanStream:
        while True:
            over = self._exchange.broke(reason, self._parts.clock())
            if over is not None:
                raise over
            self._look()
            await asyncio.sleep(_REOPEN_PAUSE_S)
            self._parts.metrics.plans.reopened.labels(self.term.worker).inc()
            stream = self._calls.execute()
            try:
                await self._open(stream)
            except EngineError as error:
                stream.close()
                reason = error
            else:
                self._look()
                return stream

    async def _write(self, stream: PlanStream) -> None:
        assert self._outgoing is not None
        outgoing = self._outgoing
        while True:
            message = await outgoing.get()
            async with asyncio.timeout(self._parts.settings.open_timeout_s):
                await stream.write(message)

    async def _read(self, stream: PlanStream) -> None:
        while True:
            match await stream.read():
                case ForwardResult() as result:
                    self._consume(result)
                case DrainAnnounced():
                    self._set_state(WorkerState.DRAINING)
                case FullPlanNeeded() as nack:
                    self._nacked("need_full", nack)
                case PlansMissing() as nack:
                    self._nacked("gap", nack)
                case LinkNack(kind) as nack:
                    self._nacked(kind, nack)

    def _nacked(self, kind: str, nack: Nack) -> None:
        self._parts.metrics.plans.nacks.labels(kind).inc()
        self._resend(self._exchange.resend(nack))

    def _resend(self, messages: list[EncodedPlan]) -> None:
        """Send plans once more under their seqs; the core hears nothing of it."""
        assert self._outgoing is not None
        for message in messages:
            self._parts.metrics.plans.resends.inc()
            self._outgoing.put_nowait(message)

    def _consume(self, result: ForwardResult) -> None:
        metrics = self._parts.metrics
        answered = self._exchange.take(result, self._parts.clock())
        if answered is None:
            metrics.plans.late_results.inc()
            return
        self._parts.counts.answered(result)
        metrics.plan_answered(rtt_s=answered.rtt_s, worker_s=worker_seconds(result.timings))
        metrics.padded(sum(forward.padded_tokens for forward in result.forwards))
        metrics.set_in_flight(self.num_in_flight)
        if self._parts.recorder is not None:
            self._parts.recorder.result_received(self.term.worker, result)
        if result.rejection is not None:
            metrics.plans.nacks.labels("rejected").inc()
        self._parts.listener.worker_event(ResultReceived(self.term.worker, result))

    # --- the worker's health

    async def _follow_reports(self) -> None:
        """Whether the worker lives though its reports broke off is for the watch to say."""
        while True:
            reason = await _first_reason(self._read_reports(), self._until_moved())
            if not may_reopen(reason):
                raise reason
            await asyncio.sleep(self._parts.settings.report_interval_ms / 1000)

    async def _read_reports(self) -> None:
        async for report in self._calls.reports(interval_ms=self._parts.settings.report_interval_ms):
            self._exchange.reported(report, self._parts.clock())
            if report.state is not None:
                self._set_state(report.state)
            self._follow_buckets(report)
            self._look()
        raise SyncError("the worker ended its report stream", field="report")

    def _follow_buckets(self, report: Report) -> None:
        # A worker without the field reports none: what it said at Attach holds.
        reported = report.buckets
        if reported and reported != self.term.info.buckets:
            self.term = replace(self.term, info=replace(self.term.info, buckets=reported))
            self._parts.listener.worker_event(BucketsChanged(self.term.worker, reported))

    def _set_state(self, state: WorkerState) -> None:
        if state is not self.state:
            self.state = state
            self._parts.metrics.set_state(state)
            self._look()
        if state is WorkerState.FAILED:
            raise DeviceFault("the worker reports that its device failed", field="state")

    def _look(self) -> None:
        """Tell the core when the worker should get no new requests, and when it may again."""
        is_leaving = self.state is WorkerState.DRAINING
        is_doubted = is_leaving or self._exchange.is_suspect(self._parts.clock())
        if is_doubted is not self._is_doubted:
            self._is_doubted = is_doubted
            worker = self.term.worker
            self._parts.metrics.set_suspect(is_suspect=is_doubted and not is_leaving)
            self._parts.listener.worker_event(WorkerDoubted(worker) if is_doubted else WorkerTrusted(worker))

    async def _watch(self) -> None:
        """Ask for the verdict when it may change, and often enough to see when this process itself stands still."""
        liveness = self._exchange.liveness
        while True:
            now = self._parts.clock()
            due = min(liveness.next_check(now), now + _LOOK_S)
            await asyncio.sleep(max(0.0, due - now))
            now = self._parts.clock()
            if now - due > _OWN_STALL_S:
                self._exchange.forgive(now, stalled_s=now - due)
                continue
            verdict = liveness.verdict(now)
            if verdict is not None:
                raise verdict
            self._look()

    # --- certificates

    async def _follow_certificates(self) -> None:
        """Move to a new channel when there are new certificates: the new one stands before the old one is left.

        A renewed certificate comes before the old one ends, so no connection outlives what it was opened with by much,
        and the term, its plans and the callers' streams go on.
        """
        certificates = self._parts.certificates
        if certificates is None:
            await asyncio.Event().wait()
            return
        tried = self._calls.certificates
        while True:
            await asyncio.sleep(self._parts.settings.certificate_check_s)
            if certificates() is not tried:
                tried = await self._hand_over()

    async def _hand_over(self) -> object:
        """Try new certificates; returns them, or the old ones when no connection came about."""
        fresh, old = self._parts.new_calls(), self._calls
        async with AsyncExitStack() as unless_used:
            unless_used.push_async_callback(fresh.close)
            if not await fresh.ready(timeout_s=self._parts.settings.open_timeout_s):
                _logger.warning("no connection with new certificates, keeping the old one", extra=self._name())
                return old.certificates
            unless_used.pop_all()
        self._calls = fresh
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
        _logger.info("connected with new certificates", extra=self._name())
        try:
            await old.close(grace_s=self._parts.settings.open_timeout_s)
        finally:  # a term that ends meanwhile waits for nothing
            await old.close()
        return fresh.certificates

    def _name(self) -> dict[str, str]:
        return {"worker": self.term.worker}

    async def _until_moved(self) -> None:
        await self._moved.wait()
        raise ConnectionLost("the connection was renewed")


async def _first_reason(*sides: Coroutine[Any, Any, None]) -> EngineError:
    """Run all sides until the first of them ends; why it did."""
    tasks = [asyncio.create_task(_reason(side)) for side in sides]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return next(task.result() for task in tasks if task in done)


async def _reason(side: Coroutine[Any, Any, None]) -> EngineError:
    """Why `side` ended, as an error of the taxonomy; anything that is not one is a bug and passes."""
    try:
        await side
    except EngineError as error:
        return error
    except TimeoutError:
        return ConnectionLost("the worker did not take a message in time")
    return UnavailableError("the plan stream ended")
