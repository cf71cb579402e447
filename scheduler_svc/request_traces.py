"""What the core's shell records of a request: its time in the queue, for metrics and traces, and the spans of its life.

The pure core knows nothing of it but the request's traceparent, which it carries. Guards: whatever ends a request or a
worker's term ends their spans; without traces nothing is remembered but queue times.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prometheus_client import Histogram

from protos.service.tracing import Attribute, OpenSpan, SpanKind, SpanStart, Tracing
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from scheduler_svc.core.events import (
    Instruction,
    RequestFinished,
    RequestRefused,
    RequestSubmitted,
    ResultReceived,
    StreamKey,
    TokensReleased,
    WorkerEvent,
    WorkerLost,
)
from scheduler_svc.observation import QueueTimes

_NS = 1e-9
_MOST_LINKS = 32
_HASH_RANGE = 1 << 32
_ODD = 2654435761
_LOST = "WORKER_LOST"


@dataclass(slots=True)
class _Life:
    """Of one traced request; times since 1970."""

    parent: str
    handle: int
    span: OpenSpan
    """The stage it is in: queue, prefill, decode."""


class RequestTraces:
    """One for the loop, all calls on its event loop."""

    def __init__(self, queue_seconds: Histogram, tracing: Tracing | None, *, plan_ratio: float) -> None:
        """Begin with nothing.

        Args:
            queue_seconds: takes the time of each request from its arrival to its first plan.
            tracing: where spans go; None: nowhere.
            plan_ratio: share of the plans with a traced request that have a span of their own.
        """
        self._queue_seconds = queue_seconds
        self._queue_times = QueueTimes()
        self._tracing = tracing
        self._plan_limit = plan_ratio * _HASH_RANGE
        self._lives: dict[StreamKey, _Life] = {}
        self._queued: dict[int, StreamKey] = {}
        """By handle: traced requests without a plan."""
        self._by_handle: dict[int, str] = {}
        """Traceparents of traced requests."""
        self._plans: dict[tuple[str, int], OpenSpan] = {}
        """By worker and seq."""

    def submitted(self, event: RequestSubmitted, handle: int, *, now: float) -> None:
        """The core has accepted a request."""
        spec = event.spec
        self._queue_times.submitted(spec.stream, handle, now=now)
        if self._tracing is not None and event.traceparent:
            attributes: dict[str, Attribute] = {
                "forwardplane.request_id": spec.request_id,
                "forwardplane.prompt_tokens": len(spec.prompt_ids),
            }
            span = self._tracing.begin(SpanStart(name="queue", parent=event.traceparent), attributes)
            self._lives[spec.stream] = _Life(event.traceparent, handle, span)
            self._queued[handle] = spec.stream
            self._by_handle[handle] = event.traceparent

    def planned(self, worker: str, plan: ForwardPlan, *, now: float) -> ForwardPlan:
        """The plan as it is to be sent: with its trace context, if it has a span."""
        if len(self._queue_times):
            for seconds in self._queue_times.planned(plan.rows.handles.tolist(), now=now):
                self._queue_seconds.observe(seconds)
        if self._tracing is None or not self._by_handle:
            return plan
        handles = [handle for handle in plan.rows.handles.tolist() if handle in self._by_handle]
        for handle in handles:
            if handle in self._queued:
                self._next_stage(self._queued.pop(handle), "prefill", worker=worker)
        if not handles or (plan.identity.seq * _ODD) % _HASH_RANGE >= self._plan_limit:
            return plan
        return self._with_span(worker, plan, handles, tracing=self._tracing)

    def told(self, instruction: Instruction) -> None:
        """Something of a request goes out to its edge."""
        if isinstance(instruction, TokensReleased):
            if self._lives and instruction.first_pos == 0 and instruction.stream in self._lives:
                self._next_stage(instruction.stream, "decode")
        elif isinstance(instruction, RequestFinished):
            usage = instruction.usage
            self._ended(
                instruction.stream, error="", tokens=usage.output_tokens, reason=instruction.reason.name.lower()
            )
        elif isinstance(instruction, RequestRefused):
            self._ended(instruction.stream, error=instruction.error.reason)

    def worker_event(self, event: WorkerEvent) -> None:
        """A plan was answered, or none of a worker will be."""
        if not self._plans:
            return
        if isinstance(event, ResultReceived):
            span = self._plans.pop((event.worker, event.result.identity.seq), None)
            if span is not None:
                _end_plan(span, event.result)
        elif isinstance(event, WorkerLost):
            for key in [key for key in self._plans if key[0] == event.worker]:
                self._plans.pop(key).end(error=_LOST)

    def _with_span(self, worker: str, plan: ForwardPlan, handles: Sequence[int], *, tracing: Tracing) -> ForwardPlan:
        """The span belongs to the first traced request, and is linked to the others."""
        parents = [self._by_handle[handle] for handle in handles]
        start = SpanStart(
            name="plan", kind=SpanKind.CLIENT, parent=parents[0], links=tuple(dict.fromkeys(parents[1:_MOST_LINKS]))
        )
        forward = plan.forwards[0]
        attributes: dict[str, Attribute] = {
            "forwardplane.worker": worker,
            "forwardplane.plan.seq": plan.identity.seq,
            "forwardplane.plan.mode": forward.mode.name.lower(),
            "forwardplane.plan.rows": plan.rows.num_rows,
            "forwardplane.plan.tokens": len(plan.tokens.ids),
        }
        span = tracing.begin(start, attributes)
        self._plans[worker, plan.identity.seq] = span
        return replace(plan, identity=replace(plan.identity, traceparent=span.traceparent))

    def _next_stage(self, stream: StreamKey, name: str, *, worker: str = "") -> None:
        assert self._tracing is not None, "only traced requests have stages"
        life, now_ns = self._lives[stream], time.time_ns()
        life.span.end(end_ns=now_ns)
        attributes = {"forwardplane.worker": worker} if worker else {}
        life.span = self._tracing.begin(SpanStart(name=name, parent=life.parent, begin_ns=now_ns), attributes)

    def _ended(self, stream: StreamKey, *, error: str, tokens: int = 0, reason: str = "") -> None:
        self._queue_times.ended(stream)
        life = self._lives.pop(stream, None)
        if life is None:
            return
        self._queued.pop(life.handle, None)
        self._by_handle.pop(life.handle, None)
        if reason:
            life.span.add({"forwardplane.output_tokens": tokens, "forwardplane.finish_reason": reason})
        life.span.end(error=error)


def _end_plan(span: OpenSpan, result: ForwardResult) -> None:
    timings = result.timings
    span.add(
        {
            "forwardplane.plan.wait_seconds": timings.wait_ns * _NS,
            "forwardplane.plan.forward_seconds": timings.forward_ns * _NS,
            "forwardplane.plan.bubble_seconds": timings.bubble_ns * _NS,
        }
    )
    span.end(error="" if result.rejection is None else result.rejection.reason)
