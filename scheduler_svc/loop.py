"""Real time around the pure core: events in, one step, plans and updates out. Sleeps until an event or a deadline.

Knows no sockets, no gRPC and no messages. Guards: events reach the core in order of arrival, one step at a time; an
error in a step passes through `run`, since the state behind it cannot be trusted.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from protos.wire.enums import FinishReason
from protos.wire.errors import StaleEpoch, SyncError, UnavailableError
from protos.wire.plan import ForwardPlan
from scheduler_svc.bridge.outbox import Messages, Outbox
from scheduler_svc.core.events import (
    Event,
    Instruction,
    NeedMask,
    PlanTimed,
    RequestCancelled,
    RequestFinished,
    RequestRefused,
    RequestSubmitted,
    SendPlan,
    StreamKey,
    TokensReleased,
    WorkerAttached,
    WorkerEvent,
    WorkerLost,
)
from scheduler_svc.core.scheduler import step, wake_at
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.metrics import CoreMetrics
from scheduler_svc.observation import (
    Exporter,
    IntegrityWatch,
    KnownWorkers,
    ObservedLink,
    WaitingCount,
    load_view,
)
from scheduler_svc.request_traces import RequestTraces

_logger = logging.getLogger(__name__)


class PlanLink(ObservedLink, Protocol):
    """A worker link as the loop sees it."""

    def send(self, plan: ForwardPlan) -> None:
        """Send a plan of the current term."""
        ...


class EdgePort(Protocol):
    """The bridge as the loop sees it."""

    def send(self, messages: Messages) -> None:
        """Send one message to each named connection."""
        ...

    def connections(self) -> Sequence[int]:
        """The connections that said hello."""
        ...


class MaskPort(Protocol):
    """Who makes grammars' masks, as the loop sees it. Answers come as events."""

    def ask(self, wanted: NeedMask) -> None:
        """Have a mask made."""
        ...

    def forget(self, stream: StreamKey) -> None:
        """The stream ended; it need not have had a grammar."""
        ...


class CoreLoop:
    """Owns the scheduling state. Listener of the bridge and of every link; all calls come on one event loop."""

    def __init__(
        self,
        settings: CoreSettings,
        *,
        metrics: CoreMetrics,
        clock: Callable[[], float],
        traces: RequestTraces | None = None,
    ) -> None:
        """Begin without requests and workers.

        Args:
            settings: the core's.
            metrics: takes what there is to count.
            clock: seconds.
            traces: follows the requests; None: for queue times only.
        """
        self._state = SchedulerState.create(settings)
        self._metrics = metrics
        self._clock = clock
        self._links: Mapping[str, PlanLink] = {}
        self._edges: EdgePort | None = None
        self._masks: MaskPort | None = None
        self._events: list[Event] = []
        self._arrived_at: float | None = None
        self._wake = asyncio.Event()
        self._workers = KnownWorkers()
        self._outbox = Outbox()
        self._load_wanted: list[int] = []
        self._traces = traces or RequestTraces(metrics.requests.queue_seconds, None, plan_ratio=0.0)
        self._exporter = Exporter(
            metrics,
            IntegrityWatch(metrics.step.invariant_checks, clock=clock),
            WaitingCount(metrics.requests.waiting_by_reason, clock=clock),
        )
        self._fenced: SyncError | None = None

    def connect(self, *, links: Mapping[str, PlanLink], edges: EdgePort, masks: MaskPort) -> None:
        """Name whom to send to. Called once, before `run`."""
        self._links = links
        self._edges = edges
        self._masks = masks

    async def run(self) -> None:
        """Step for ever.

        Raises:
            SyncError: another scheduler has taken over; every stream has been told.
        """
        while True:
            await self._wait()
            sends_plans = self._step()
            if sends_plans:
                # The links' writers come first: no worker waits while edges are told and figures exported.
                await asyncio.sleep(0)
            self._tell()
            if self._fenced is not None:
                self._end_streams(UnavailableError("another scheduler has taken over", retry_after_ms=1000))
                raise self._fenced

    # --- from the bridge

    def edge_connected(self, edge: int) -> None:
        """Tell a new edge what is served."""
        self._outbox.add_model(edge, self._workers.view(self._state.settings))
        self._wake.set()

    def edge_events(self, events: Sequence[Event]) -> None:
        """Take an edge's submits and cancellations."""
        self._post(events)

    def load_wanted(self, edge: int) -> None:
        """Answer with a snapshot after the next step."""
        self._load_wanted.append(edge)
        self._wake.set()

    def edge_of(self, request_id: str) -> int | None:
        """The edge whose request that is; None: there is none (any more)."""
        pending = [event.spec for event in self._events if isinstance(event, RequestSubmitted)]
        live = (request.spec for request in self._state.streams.values())
        return next((spec.stream.edge for spec in (*live, *pending) if spec.request_id == request_id), None)

    def edge_lost(self, edge: int) -> None:
        """Cancel every request of the edge."""
        streams = [stream for stream in self._state.streams if stream.edge == edge]
        pending = [event.spec.stream for event in self._events if isinstance(event, RequestSubmitted)]
        streams.extend(stream for stream in pending if stream.edge == edge)
        self._post([RequestCancelled(stream, FinishReason.ABORT) for stream in streams])

    # --- from the links

    def worker_event(self, event: WorkerEvent) -> None:
        """Take what a worker says; edges are told when what is served changes."""
        self._post([event])
        self._traces.worker_event(event)
        if isinstance(event, WorkerAttached):
            self._workers.attached(event.worker, event.info)
        elif isinstance(event, WorkerLost):
            self._workers.lost(event.worker)
        else:
            return
        page_size, num_pages = self._workers.cache_size()
        self._metrics.describe_cache(page_size=page_size, num_pages=num_pages)
        view = self._workers.view(self._state.settings)
        for edge in self._edge_port.connections():
            self._outbox.add_model(edge, view)

    def worker_fenced(self, worker: str, error: StaleEpoch) -> None:
        """End the service: what this scheduler plans is no longer run."""
        extra = {"worker": worker, "highest_epoch": error.highest_epoch, "highest_term": error.highest_term}
        _logger.error("another scheduler has taken a worker", extra=extra)
        self.fenced(error)

    def fenced(self, error: SyncError) -> None:
        """End the service: another scheduler has taken over, or is to."""
        _logger.error("this scheduler's time is over", extra={"reason": error.reason, "error": error.message})
        self._fenced = error
        self._wake.set()

    # --- from the grammar processes

    def masks_ready(self, events: Sequence[Event]) -> None:
        """Take masks, or why there are none."""
        self._post(events)

    # --- one turn

    @property
    def _edge_port(self) -> EdgePort:
        assert self._edges is not None, "connect comes before everything"
        return self._edges

    @property
    def _mask_port(self) -> MaskPort:
        assert self._masks is not None, "connect comes before everything"
        return self._masks

    def _post(self, events: Sequence[Event]) -> None:
        if not events:
            return
        if self._arrived_at is None:
            self._arrived_at = self._clock()
        self._events.extend(events)
        self._wake.set()

    async def _wait(self) -> None:
        exporter = self._exporter
        wanted = (wake_at(self._state), exporter.integrity.wake_at(self._state), exporter.waiting.wake_at())
        due = [at for at in wanted if at is not None]
        limit_s = max(0.0, min(due) - self._clock()) if due else None
        try:
            async with asyncio.timeout(limit_s):
                await self._wake.wait()
        except TimeoutError:
            pass  # what the core or the check of its books asked to be woken for
        self._wake.clear()

    def _step(self) -> bool:
        """Step the core and hand its plans to the links; whether there were any."""
        events, self._events = self._events, []
        now = self._clock()
        arrived_at, self._arrived_at = self._arrived_at or now, None
        instructions = step(self._state, events, now)
        self._metrics.step.build_seconds.observe(self._clock() - now)
        if events:
            self._metrics.step.loop_lag_seconds.observe(now - arrived_at)
        self._note_submitted(events, arrived_at)
        plans = [instruction for instruction in instructions if isinstance(instruction, SendPlan)]
        for plan in plans:  # a device may wait for them
            self._send(plan, now)
        for instruction in instructions:
            self._carry_out(instruction)
        if events:
            self._exporter.integrity.changed()
        return bool(plans)

    def _tell(self) -> None:
        """Edges of their streams, and everybody who watches of the core."""
        gauges = self._state.gauges()
        self._exporter.export(gauges, self._state.counters)
        self._exporter.waiting.turned(self._state)
        for edge in self._load_wanted:
            self._outbox.add_load(edge, load_view(gauges, self._links.values()))
        self._load_wanted.clear()
        self._edge_port.send(self._outbox.take())
        self._exporter.integrity.check_if_due(self._state, gauges)

    def _note_submitted(self, events: Sequence[Event], arrived_at: float) -> None:
        for event in events:
            if isinstance(event, RequestSubmitted):
                request = self._state.streams.get(event.spec.stream)
                if request is not None:
                    self._traces.submitted(event, request.handle, now=arrived_at)

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, TokensReleased):
            self._outbox.add(instruction)
            self._traces.told(instruction)
            return
        if isinstance(instruction, SendPlan):
            return
        if isinstance(instruction, NeedMask):
            self._mask_port.ask(instruction)
            return
        if isinstance(instruction, PlanTimed):
            ratio = self._metrics.step.prediction_ratio.labels(instruction.worker)
            ratio.observe(instruction.measured_s / instruction.predicted_s)
            return
        self._outbox.add(instruction)
        self._traces.told(instruction)
        if isinstance(instruction, RequestFinished | RequestRefused):
            self._mask_port.forget(instruction.stream)

    def _send(self, instruction: SendPlan, now: float) -> None:
        rows = instruction.plan.rows
        self._metrics.step.batch_rows.observe(rows.num_rows)
        plan = self._traces.planned(instruction.worker, instruction.plan, now=now)
        self._links[instruction.worker].send(plan)

    def _end_streams(self, error: UnavailableError) -> None:
        for stream in self._state.streams:
            self._outbox.add(RequestRefused(stream, error))
        self._edge_port.send(self._outbox.take())
