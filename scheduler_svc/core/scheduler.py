"""The scheduling core: events in, instructions out. Deterministic; no I/O, clock, randomness or logging."""

import heapq
from collections.abc import Sequence

from protos.wire.enums import FinishReason
from protos.wire.errors import InternalFault
from scheduler_svc.core.admission import known_end, output_refusal, refusal
from scheduler_svc.core.dispatch import send_next
from scheduler_svc.core.events import (
    BucketsChanged,
    CacheFlushed,
    CacheFlushRequested,
    Event,
    Instruction,
    MaskReady,
    ReaderPaused,
    ReaderResumed,
    RequestCancelled,
    RequestSubmitted,
    ResultReceived,
    WorkerAttached,
    WorkerDoubted,
    WorkerLost,
    WorkerTrusted,
)
from scheduler_svc.core.masks import take_mask
from scheduler_svc.core.placement import admit_waiting
from scheduler_svc.core.request import Request
from scheduler_svc.core.results import consume
from scheduler_svc.core.state import SchedulerState, next_deadline
from scheduler_svc.core.transitions import accept, fail, finish, pause, refuse, resume
from scheduler_svc.core.worker_events import apply_to_worker


def step(state: SchedulerState, events: Sequence[Event], now: float) -> list[Instruction]:
    """Apply the events in order, end what is due at `now`, then fill every worker's window.

    Raises:
        UnsupportedFeature: a worker was attached that `check_worker` refuses.
    """
    state.now = now
    out: list[Instruction] = []
    for event in events:
        _apply(state, event, out)
    _end_expired(state, out)
    _schedule(state, out)
    return out


def wake_at(state: SchedulerState) -> float | None:
    """When `step` must run again though nothing happened; None: not before an event."""
    return next_deadline(state)


def _apply(state: SchedulerState, event: Event, out: list[Instruction]) -> None:
    match event:
        case ResultReceived():
            consume(state, event, out)
        case RequestSubmitted():
            _submit(state, event, out)
        case RequestCancelled() | ReaderPaused() | ReaderResumed():
            request = state.streams.get(event.stream)
            if request is not None:
                _apply_to(state, request, event, out)
        case MaskReady():
            take_mask(state, event, out)
        case CacheFlushRequested(edge):
            freed = sum(worker.memory.cache.flush() for worker in state.workers.values())
            out.append(CacheFlushed(edge, freed))
        case WorkerAttached() | WorkerLost() | WorkerDoubted() | WorkerTrusted() | BucketsChanged():
            apply_to_worker(state, event, out)


def _apply_to(
    state: SchedulerState,
    request: Request,
    event: RequestCancelled | ReaderPaused | ReaderResumed,
    out: list[Instruction],
) -> None:
    match event:
        case RequestCancelled(_, reason):
            finish(state, request, reason=reason, out=out)
        case ReaderPaused():
            pause(state, request)
        case ReaderResumed():
            resume(state, request)


def _submit(state: SchedulerState, event: RequestSubmitted, out: list[Instruction]) -> None:
    spec, known = event.spec, event.output_ids
    twin = state.streams.get(spec.stream)
    if twin is not None:  # an edge's bug: neither can be told from the other any more
        fail(state, twin, error=InternalFault("two live requests of one stream", field="stream"), out=out)
        return
    error = refusal(state, spec) or output_refusal(state, event)
    if error is not None:
        refuse(state, spec, error=error, out=out)
        return
    request = accept(state, spec, output_ids=known)
    ended = known_end(event)
    if ended is not None:  # only its end was not heard
        finish(state, request, reason=ended, out=out, stop_token_id=known[-1] if ended is FinishReason.STOP else None)
        return
    wanted = request.mask_wanted()
    if wanted is not None:
        out.append(wanted)


def _end_expired(state: SchedulerState, out: list[Instruction]) -> None:
    while (deadline := next_deadline(state)) is not None and deadline <= state.now:
        _, _, request = heapq.heappop(state.deadlines)
        finish(state, request, reason=FinishReason.DEADLINE, out=out)


def _schedule(state: SchedulerState, out: list[Instruction]) -> None:
    """One plan per worker and round, until no worker has both room in its window and something to compute."""
    open_workers = list(state.workers.values())
    while open_workers:
        admit_waiting(state, out)
        open_workers = [worker for worker in open_workers if send_next(state, worker, out)]
