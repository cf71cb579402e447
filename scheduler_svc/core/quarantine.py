"""Workers that get no new requests as long as others serve: doubted ones, and ones that gave bad numbers of late."""

from collections import deque

from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.worker_state import WorkerState

QUARANTINE_REQUESTS = 3
"""Different requests with bad numbers within the window: one alone may have itself to blame."""
QUARANTINE_WINDOW_S = 60.0


def note_bad_numbers(worker: WorkerState, handle: int, now: float) -> None:
    """A row of that request was not finite, or its pages were not what they should be."""
    worker.standing.bad_rows.append((now, handle))
    _forget_old(worker.standing.bad_rows, now)


def is_quarantined(worker: WorkerState, now: float) -> bool:
    """Whether its device is under suspicion."""
    if not worker.standing.bad_rows:
        return False
    _forget_old(worker.standing.bad_rows, now)
    return len({handle for _, handle in worker.standing.bad_rows}) >= QUARANTINE_REQUESTS


def open_workers(state: SchedulerState) -> list[WorkerState]:
    """Those that new requests may go to: all, if none is beyond doubt."""
    everyone = list(state.workers.values())
    good = [worker for worker in everyone if not worker.standing.is_doubted and not is_quarantined(worker, state.now)]
    return good or everyone


def _forget_old(rows: deque[tuple[float, int]], now: float) -> None:
    while rows and rows[0][0] <= now - QUARANTINE_WINDOW_S:
        rows.popleft()
