"""What happens to workers: attached, lost, doubted, trusted; and what that does to the requests on them."""

from dataclasses import replace

from protos.wire.errors import SuspectedPoison
from scheduler_svc.core.admission import never_fits
from scheduler_svc.core.attachment import attach
from scheduler_svc.core.counters import MigrationCause
from scheduler_svc.core.events import (
    BucketsChanged,
    Instruction,
    WorkerAttached,
    WorkerDoubted,
    WorkerLost,
    WorkerTrusted,
)
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.strikes import strike
from scheduler_svc.core.transitions import fail, requeue
from scheduler_svc.core.worker_facts import WorkerFacts


def apply_to_worker(
    state: SchedulerState,
    event: WorkerAttached | WorkerLost | WorkerDoubted | WorkerTrusted | BucketsChanged,
    out: list[Instruction],
) -> None:
    """Take the event.

    Raises:
        UnsupportedFeature: a worker was attached that `check_worker` refuses.
    """
    match event:
        case WorkerAttached():
            _attach(state, event, out)
        case WorkerLost():
            _lose(state, event, out=out)
        case WorkerDoubted(worker) | WorkerTrusted(worker):
            if worker in state.workers:
                state.workers[worker].standing.is_doubted = isinstance(event, WorkerDoubted)
        case BucketsChanged(worker, buckets):
            if worker in state.workers:
                state.workers[worker].info = replace(state.workers[worker].info, buckets=buckets)


def _attach(state: SchedulerState, event: WorkerAttached, out: list[Instruction]) -> None:
    _lose(state, WorkerLost(event.worker), out=out)
    worker = attach(event, state.settings)
    state.workers[event.worker] = worker
    state.known[event.worker] = WorkerFacts(event.info, worker.memory.capacity)
    for request in list(state.waiting):
        error = never_fits(state, request.spec)
        if error is not None:
            fail(state, request, error=error, out=out)


def _lose(state: SchedulerState, event: WorkerLost, *, out: list[Instruction]) -> None:
    worker = state.workers.get(event.worker)
    if worker is None:
        return
    if event.died and worker.in_flight:
        state.counters.strikes += 1
        poison = strike(worker)
        if poison is not None:
            message = f"{poison.trouble.strikes} workers died while they computed this request"
            fail(state, poison, error=SuspectedPoison(message, field="request"), out=out)
    cause = _cause(event)
    for request in list(worker.running.values()):
        requeue(state, request)
        state.counters.migrations_by_cause[cause] += 1
    state.counters.cache.evicted_pages += worker.memory.cache.evicted_pages
    state.foresight.lost(event.worker)
    del state.workers[event.worker]


def _cause(event: WorkerLost) -> MigrationCause:
    if event.died:
        return MigrationCause.WORKER_DIED
    return MigrationCause.DRAIN if event.drained else MigrationCause.WORKER_LOST
