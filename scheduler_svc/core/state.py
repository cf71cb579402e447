"""Everything the scheduling core remembers between two steps."""

import heapq
from dataclasses import dataclass, field

from protos.wire.errors import InternalFault
from scheduler_svc.core.counters import CoreCounters, CoreGauges, WorkerGauges
from scheduler_svc.core.events import StreamKey
from scheduler_svc.core.foresight import Foresight
from scheduler_svc.core.policy import make_policy
from scheduler_svc.core.request import Request, RequestStatus
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.wait_reasons import LastLook
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.core.worker_facts import WorkerFacts
from scheduler_svc.core.worker_state import WorkerState
from scheduler_svc.memory.memory_check import check_memory

_DEAD_DEADLINES = 64


@dataclass(slots=True, eq=False)
class SchedulerState:
    """Mutable; changed only by `step`."""

    settings: CoreSettings
    new_token_ratio: float
    waiting: WaitingQueue
    now: float = 0.0
    """Of the current step, on the clock of the shell."""
    streams: dict[StreamKey, Request] = field(default_factory=dict)
    """Every live request: waiting, or on a worker."""
    workers: dict[str, WorkerState] = field(default_factory=dict)
    """Attached now."""
    known: dict[str, WorkerFacts] = field(default_factory=dict)
    """Ever attached."""
    deadlines: list[tuple[float, int, Request]] = field(default_factory=list)
    """Heap; entries of ended requests are dropped when they reach the top or are too many."""
    foresight: Foresight = field(default_factory=Foresight)
    last_look: LastLook = field(default_factory=LastLook)
    """Why those wait who wait."""
    next_handle: int = 1
    counters: CoreCounters = field(default_factory=CoreCounters)

    @classmethod
    def create(cls, settings: CoreSettings) -> "SchedulerState":
        """The state of a core that has seen nothing."""
        waiting = WaitingQueue(make_policy(settings))
        return cls(settings=settings, new_token_ratio=settings.new_token_ratio_start, waiting=waiting)

    def gauges(self) -> CoreGauges:
        """A snapshot for metrics and GetLoad."""
        return CoreGauges(
            running=len(self.streams) - len(self.waiting),
            waiting=len(self.waiting),
            waiting_tokens=self.waiting.tokens,
            new_token_ratio=self.new_token_ratio,
            workers=tuple(_worker_gauges(worker) for worker in self.workers.values()),
        )


def next_deadline(state: SchedulerState) -> float | None:
    """The earliest deadline of a live request."""
    heap = state.deadlines
    if len(heap) > 2 * len(state.streams) + _DEAD_DEADLINES:
        heap[:] = [entry for entry in heap if entry[2].status is not RequestStatus.FINISHED]
        heapq.heapify(heap)
    while heap and heap[0][2].status is RequestStatus.FINISHED:
        heapq.heappop(heap)
    return heap[0][0] if heap else None


def check_invariants(state: SchedulerState) -> None:
    """That queue, workers, pages and plans in flight agree. For tests, idle moments and samples in production.

    Raises:
        InternalFault: they do not; says which rule.
    """
    waiting = list(state.waiting)
    running = [request for worker in state.workers.values() for request in worker.running.values()]
    live = sorted(request.handle for request in state.streams.values())
    _require(sorted(request.handle for request in waiting + running) == live, "a request is in one place")
    _require(state.waiting.tokens == sum(request.sampled_len for request in waiting), "waiting tokens are counted")
    asking = [request for request in waiting if not request.standing.is_paused]
    _require(state.waiting.asking_tokens == sum(request.sampled_len for request in asking), "asking tokens are counted")
    _require(state.waiting.is_asking == bool(asking), "paused requests are counted")
    for request in waiting:
        _require(request.status is RequestStatus.WAITING, "a queued request waits")
        _require(request.holding is None and request.planned_len == request.kv_len == 0, "a queued request has no KV")
    for worker in state.workers.values():
        _check_worker(worker)


def _check_worker(worker: WorkerState) -> None:
    running = list(worker.running.values())
    check_memory(worker.memory, [request.holding for request in running if request.holding is not None])
    _require(len(running) <= worker.row_limit, "requests on a worker are within its rows")
    _require(len(worker.in_flight) <= worker.window, "plans in flight are within the window")
    seqs = [plan.seq for plan in worker.in_flight]
    _require(seqs == list(range(worker.next_seq - len(seqs), worker.next_seq)), "seqs in flight are contiguous")
    planned = {request.handle: request.kv_len for request in running}
    samples = dict.fromkeys(planned, 0)
    for plan in worker.in_flight:
        for row in plan.rows:
            if row.request.attempt == row.attempt:
                handle = row.request.handle
                _require(planned.get(handle) == row.first_position, "plans in flight continue one another")
                planned[handle] = row.seq_len
                samples[handle] += row.samples
    for request in running:
        _check_running(request, planned=planned[request.handle], samples=samples[request.handle])


def _check_running(request: Request, *, planned: int, samples: int) -> None:
    holding = request.holding
    _require(request.status in (RequestStatus.PREFILLING, RequestStatus.RUNNING), "a request on a worker is active")
    _require(holding is not None and request.planned_len <= holding.allocated_len, "planned positions have pages")
    _require(request.planned_len == planned, "planned_len is kv_len and what is in flight")
    _require(request.kv_len < request.sampled_len, "the newest token has no KV")
    most_planned = request.sampled_len + samples - (not request.is_prefill_only)
    _require(request.planned_len <= most_planned, "planned tokens are known or being sampled")
    _require(request.output_len + samples <= request.spec.max_tokens, "no output beyond max_tokens is planned")
    counts = None if request.rules is None else request.rules.counts
    _require(counts is None or counts.total == request.output_len, "every output token is counted for penalties")
    last_chunk_planned = request.planned_len + 1 == request.sampled_len + samples
    _require((request.status is RequestStatus.RUNNING) == last_chunk_planned or samples == 0, "status fits the plans")


def _require(holds: object, rule: str) -> None:
    if not holds:
        raise InternalFault(f"invariant broken: {rule}")


def _worker_gauges(worker: WorkerState) -> WorkerGauges:
    memory = worker.memory
    cached = [memory.cache.evictable(index) for index in range(len(memory.allocators))]
    return WorkerGauges(
        worker=worker.name,
        requests=len(worker.running),
        plans_in_flight=len(worker.in_flight),
        pages=tuple(allocator.usable for allocator in memory.allocators),
        pages_used=tuple(pool.held - unused for pool, unused in zip(memory.allocators, cached, strict=True)),
        pages_cached=tuple(cached),
        evicted_pages=memory.cache.evicted_pages,
        budget_tokens=worker.budget_tokens,
        prediction_error=worker.cost.error_ratio,
    )
