"""Requests that were being computed when a worker died: each is tried alone, so that the guilty one is found.

A struck request runs as the only row in flight until it has passed the position at which the worker died, which clears
it. It fails only when a worker dies while it is alone, having been struck at least twice before: a request that kills
any worker kills three, and two kills of whatever cause fail nobody.
"""

from scheduler_svc.core.request import Request, RequestStatus
from scheduler_svc.core.worker_state import WorkerState

_STRIKES_BEFORE_POISON = 2


def strike(worker: WorkerState) -> Request | None:
    """The worker died with its plans in flight: mark their requests; the one that must end, if one must."""
    reached: dict[int, int] = {}
    requests: dict[int, Request] = {}
    for plan in worker.in_flight:
        for row in plan.rows:
            handle = row.request.handle
            requests[handle] = row.request
            reached[handle] = max(reached.get(handle, 0), row.seq_len)
    poison = None
    for handle, request in requests.items():
        if request.status is RequestStatus.FINISHED:
            continue
        trouble = request.trouble
        if len(requests) == 1 and trouble.strikes >= _STRIKES_BEFORE_POISON:
            poison = request
        trouble.strikes += 1
        trouble.alone_until = max(trouble.alone_until, reached[handle])
    return poison
