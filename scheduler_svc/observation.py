"""What the core's state looks like from outside: its figures as metrics, and the views that edges ask for.

Reads the state between two steps, never changes it. No clock: times are arguments.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

from prometheus_client import Counter, Gauge

from protos.wire.enums import GraphPhase, SubPoolKind, WorkerState
from protos.wire.errors import InternalFault
from protos.wire.worker_info import Buckets, WorkerInfo
from scheduler_svc.bridge.views import GraphView, LoadView, ModelView, WorkerView
from scheduler_svc.core.attachment import sequence_capacity
from scheduler_svc.core.counters import CoreCounters, CoreGauges, WorkerGauges
from scheduler_svc.core.events import StreamKey
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state import SchedulerState, check_invariants
from scheduler_svc.core.wait_reasons import WaitReason
from scheduler_svc.links.statistics import LinkCounts, PhaseCounts
from scheduler_svc.metrics import CheckOutcome, CoreMetrics

_logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 10.0
_MOST_CHECK_SHARE = 0.001
"""Of all time."""
_MOST_PAGES_WHILE_BUSY = 10_000
"""A check takes about 2 microseconds a page."""
_COUNT_INTERVAL_S = 1.0
_SHORT_QUEUE = 64
"""Requests that are counted at every turn: that takes about 20 microseconds."""


class ObservedLink(Protocol):
    """What the load answer needs of a worker link."""

    worker: str
    counts: LinkCounts

    @property
    def state(self) -> WorkerState | None:
        """The attached worker's state; None while none is."""
        ...

    @property
    def info(self) -> WorkerInfo | None:
        """What the attached worker said of itself; None while none is."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Plans without a result."""
        ...


def model_view(attached: Iterable[WorkerInfo], known: Iterable[WorkerInfo], settings: CoreSettings) -> ModelView:
    """What every attached worker can do, and the queue take; the first worker names the numerics.

    While none is attached, what those could do that were: requests wait for their return, and are admitted by them.
    """
    serving = list(attached)
    infos = serving or list(known)
    if not infos:
        return ModelView()
    return ModelView(
        context_tokens=min(info.limits.context_tokens for info in infos),
        capacity_tokens=max(sequence_capacity(info, settings).tokens for info in infos),
        logits_width=min(info.logits_width for info in infos),
        dtype=infos[0].dtype,
        numerics=infos[0].numerics,
        max_logprobs=min(info.limits.max_logprobs for info in infos),
        max_hidden_states=min(info.limits.max_hidden_states for info in infos),
        max_hidden_mode=min(info.max_hidden_mode for info in infos),
        max_waiting_requests=settings.max_waiting_requests,
        max_waiting_tokens=settings.max_waiting_tokens,
        serving=bool(serving),
    )


def cache_size(infos: Iterable[WorkerInfo]) -> tuple[int, int]:
    """Tokens of a page, and usable pages, of the sub-pools that hold whole sequences; all workers together."""
    pools = [pool for info in infos for pool in info.sub_pools if pool.kind is SubPoolKind.FULL]
    return max((pool.page_size for pool in pools), default=0), sum(pool.num_pages - 1 for pool in pools)


class KnownWorkers:
    """What the workers said of themselves: those that are attached, and those that were."""

    def __init__(self) -> None:
        self._attached: dict[str, WorkerInfo] = {}
        self._known: dict[str, WorkerInfo] = {}

    def attached(self, worker: str, info: WorkerInfo) -> None:
        """It is attached, anew or for the first time."""
        self._attached[worker] = self._known[worker] = info

    def lost(self, worker: str) -> None:
        """It is attached no more."""
        self._attached.pop(worker, None)

    def view(self, settings: CoreSettings) -> ModelView:
        """What edges are told."""
        return model_view(self._attached.values(), self._known.values(), settings)

    def cache_size(self) -> tuple[int, int]:
        """Of those that are attached."""
        return cache_size(self._attached.values())


def load_view(gauges: CoreGauges, links: Iterable[ObservedLink]) -> LoadView:
    """The core and all configured workers, attached or not."""
    by_name = {worker.worker: worker for worker in gauges.workers}
    return LoadView(
        requests_running=gauges.running,
        requests_waiting=gauges.waiting,
        kv_usage=_usage(gauges),
        workers=tuple(_worker_view(link, by_name.get(link.worker)) for link in links),
    )


class QueueTimes:
    """When requests were submitted that no plan has had a row of yet."""

    def __init__(self) -> None:
        self._submitted_at: dict[int, float] = {}
        self._handles: dict[StreamKey, int] = {}

    def __len__(self) -> int:
        return len(self._submitted_at)

    def submitted(self, stream: StreamKey, handle: int, *, now: float) -> None:
        """The core has accepted a request."""
        self._submitted_at[handle] = now
        self._handles[stream] = handle

    def planned(self, handles: Iterable[int], *, now: float) -> list[float]:
        """The queue times of those of a plan's rows that are their requests' first."""
        if not self._submitted_at:
            return []
        first = [handle for handle in handles if handle in self._submitted_at]
        return [now - self._submitted_at.pop(handle) for handle in first]

    def ended(self, stream: StreamKey) -> None:
        """The request has had its last word."""
        handle = self._handles.pop(stream, None)
        if handle is not None:
            self._submitted_at.pop(handle, None)


class IntegrityWatch:
    """Checks the core's books when it is idle, and samples them while it is busy. The cost is bounded.

    What is broken is counted and logged; streams go on, since each stands on its own pages.
    """

    def __init__(self, checks: Counter, *, clock: Callable[[], float]) -> None:
        self._checks = checks
        self._clock = clock
        self._is_due_at = 0.0
        self._has_changed = False

    def changed(self) -> None:
        """A step has had events."""
        self._has_changed = True

    def wake_at(self, state: SchedulerState) -> float | None:
        """When an idle core should be checked; None: not again before something changes."""
        return self._is_due_at if self._has_changed and not state.streams else None

    def check_if_due(self, state: SchedulerState, gauges: CoreGauges) -> None:
        """Check, unless a check was not long ago, or would hold up a busy core."""
        began = self._clock()
        if not self._has_changed or began < self._is_due_at:
            return
        if state.streams and _pages_held(gauges) > _MOST_PAGES_WHILE_BUSY:
            return
        outcome = CheckOutcome.OK
        try:
            check_invariants(state)
        except InternalFault as error:
            outcome = CheckOutcome.BROKEN
            _logger.exception("the core's books are wrong", extra={"rule": error.message})
        self._checks.labels(outcome.value).inc()
        self._has_changed = False
        ended = self._clock()
        self._is_due_at = ended + max(_CHECK_INTERVAL_S, (ended - began) / _MOST_CHECK_SHARE)


class WaitingCount:
    """Counts those who wait by what they wait for; a long queue once a second, so that a turn's cost is bounded."""

    def __init__(self, gauge: Gauge, *, clock: Callable[[], float]) -> None:
        self._gauges = {reason: gauge.labels(reason.value) for reason in WaitReason}
        self._clock = clock
        self._counted_at = -_COUNT_INTERVAL_S
        self._has_changed = False
        self._shows_any = False

    def wake_at(self) -> float | None:
        """When the gauge is to be brought up to date; None: it is."""
        return self._counted_at + _COUNT_INTERVAL_S if self._has_changed else None

    def turned(self, state: SchedulerState) -> None:
        """A step is over."""
        waiting = len(state.waiting)
        if not waiting and not self._shows_any:
            self._has_changed = False
            return
        now = self._clock()
        self._has_changed = waiting > _SHORT_QUEUE and now < self._counted_at + _COUNT_INTERVAL_S
        if self._has_changed:
            return
        self._counted_at = now
        self._shows_any = waiting > 0
        counts = state.last_look.count(state.waiting)
        for reason, gauge in self._gauges.items():
            gauge.set(counts[reason])


@dataclass(slots=True)
class Exporter:
    """Copies the core's figures to the metrics after a step. Counters of the core only grow."""

    metrics: CoreMetrics
    integrity: IntegrityWatch
    waiting: WaitingCount
    _seen: dict[str, int] = field(default_factory=dict)

    def export(self, gauges: CoreGauges, counters: CoreCounters) -> None:
        """Set gauges, and raise counters by what was added since the last call."""
        requests, step = self.metrics.requests, self.metrics.step
        requests.running.set(gauges.running)
        requests.waiting.set(gauges.waiting)
        step.kv_pages.set(_pages(gauges))
        step.kv_pages_used.set(_pages_used(gauges))
        step.kv_pages_cached.set(sum(sum(worker.pages_cached) for worker in gauges.workers))
        for worker in gauges.workers:
            step.budget_tokens.labels(worker.worker).set(worker.budget_tokens)
            step.prediction_error_ratio.labels(worker.worker).set(worker.prediction_error)
        step.kv_usage_ratio.set(_usage(gauges))
        for name, counter, value in (
            ("prompt", requests.prompt_tokens, counters.prompt_tokens),
            ("output", requests.output_tokens, counters.output_tokens),
            ("cached", requests.prompt_tokens_cached, counters.cache.prompt_tokens),
            ("queried", self.metrics.cache.queried_tokens, counters.cache.queried_tokens),
            ("hit", self.metrics.cache.hit_tokens, counters.cache.hit_tokens),
            ("evicted", self.metrics.cache.evicted_pages, _evicted_pages(gauges, counters)),
            ("retractions", requests.retractions, counters.retractions),
            ("prefill", step.scheduled_tokens.labels("prefill"), counters.prefill_tokens),
            ("decode", step.scheduled_tokens.labels("decode"), counters.decode_tokens),
        ):
            counter.inc(self._added(name, value))
        for cause, count in counters.migrations_by_cause.items():
            requests.migrations.labels(cause.value).inc(self._added(f"migrations {cause}", count))
        for reason, count in counters.finished.items():
            label = reason.name.lower()
            requests.finished.labels(label).inc(self._added(f"finished {label}", count))
        for refused, count in counters.refused.items():
            requests.refused.labels(refused).inc(self._added(f"refused {refused}", count))

    def _added(self, name: str, value: int) -> int:
        added = value - self._seen.get(name, 0)
        self._seen[name] = value
        return added


def _worker_view(link: ObservedLink, gauges: WorkerGauges | None) -> WorkerView:
    info = link.info
    counts = link.counts
    return WorkerView(
        name=link.worker,
        state=link.state,
        device=info.device if info else "",
        dtype=info.dtype if info else "",
        numerics=info.numerics if info else "",
        kernels=info.kernels if info else "",
        requests_running=gauges.requests if gauges else 0,
        pages=sum(gauges.pages) if gauges else 0,
        pages_used=sum(gauges.pages_used) if gauges else 0,
        plans_in_flight=link.num_in_flight,
        plans=counts.plans,
        plan_rows=counts.plan_rows,
        plan_bytes=counts.plan_bytes,
        graphs=_graph_views(counts.graphs, info.buckets if info else ()),
    )


def _graph_views(ran: Mapping[GraphPhase, PhaseCounts], captured: tuple[Buckets, ...]) -> tuple[GraphView, ...]:
    buckets = {entry.phase: entry for entry in captured}
    nothing_ran = PhaseCounts()
    views = []
    for phase in sorted({*ran, *buckets}):
        found, entry = ran.get(phase, nothing_ran), buckets.get(phase, Buckets(phase=phase, sizes=(), live=()))
        views.append(
            GraphView(
                phase=phase,
                replays=found.replays,
                real_tokens=found.real_tokens,
                padded_tokens=found.padded_tokens,
                misses=tuple(sorted(found.misses.items())),
                live=len(entry.live),
                dead=len(entry.dead),
                planned=len(entry.sizes),
                graph_bytes=entry.graph_bytes,
                capture_ms=entry.capture_ms,
            )
        )
    return tuple(views)


def _pages(gauges: CoreGauges) -> int:
    return sum(sum(worker.pages) for worker in gauges.workers)


def _pages_used(gauges: CoreGauges) -> int:
    return sum(sum(worker.pages_used) for worker in gauges.workers)


def _evicted_pages(gauges: CoreGauges, counters: CoreCounters) -> int:
    return counters.cache.evicted_pages + sum(worker.evicted_pages for worker in gauges.workers)


def _pages_held(gauges: CoreGauges) -> int:
    return sum(sum(worker.pages_used) + sum(worker.pages_cached) for worker in gauges.workers)


def _usage(gauges: CoreGauges) -> float:
    """Of the fullest sub-pool, all workers together: once that is full nothing more fits, whatever the others hold."""
    pages = map(sum, zip_longest(*(worker.pages for worker in gauges.workers), fillvalue=0))
    used = map(sum, zip_longest(*(worker.pages_used for worker in gauges.workers), fillvalue=0))
    return max((held / there for held, there in zip(used, pages, strict=True) if there), default=0.0)
