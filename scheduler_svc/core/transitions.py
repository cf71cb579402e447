"""How a request changes hands: to a worker, back to the queue, back on its pages, and out.

The only code that moves a request between queue, worker and end, so pages have one release path.
"""

import heapq

from protos.wire.enums import FinishReason
from protos.wire.errors import EngineError
from scheduler_svc.core.events import Instruction, RequestFinished, RequestRefused, RequestSpec, Usage
from scheduler_svc.core.request import Request, RequestStatus, new_request
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.worker_state import WorkerState


def accept(state: SchedulerState, spec: RequestSpec) -> Request:
    """A new request, behind all that wait."""
    request = new_request(spec, state.next_handle)
    state.next_handle += 1
    state.streams[spec.stream] = request
    state.waiting.append(request)
    heapq.heappush(state.deadlines, (spec.deadline_s, request.handle, request))
    state.counters.prompt_tokens += request.prompt_len
    return request


def place(request: Request, worker: WorkerState) -> None:
    """Reserve pages for all known tokens on the worker. The caller takes the request out of the queue."""
    request.move_to(RequestStatus.PREFILLING)
    request.holding = worker.memory.reserve(request.sampled_len)
    worker.running[request.handle] = request


def requeue(state: SchedulerState, request: Request) -> None:
    """Off its worker and back into the queue by seniority, outputs kept, nothing of its KV."""
    _leave_worker(state, request)
    request.void_plans(kv_len=0)
    request.move_to(RequestStatus.WAITING)
    state.waiting.put_back(request)


def rewind(request: Request) -> None:
    """Plan again from `kv_len`, on the same pages; what is in flight no longer counts."""
    request.void_plans(request.kv_len)
    only_newest_left = request.kv_len + 1 == request.sampled_len and request.output_len > 0
    status = RequestStatus.RUNNING if only_newest_left else RequestStatus.PREFILLING
    if status is not request.status:
        request.move_to(status)


def finish(
    state: SchedulerState,
    request: Request,
    *,
    reason: FinishReason,
    out: list[Instruction],
    stop_token_id: int | None = None,
) -> None:
    """End a request with a reason; its last word."""
    _remove(state, request)
    state.counters.finished[reason] = state.counters.finished.get(reason, 0) + 1
    usage = Usage(prompt_tokens=request.prompt_len, cached_tokens=0, output_tokens=request.output_len)
    out.append(RequestFinished(stream=request.spec.stream, reason=reason, usage=usage, stop_token_id=stop_token_id))


def fail(state: SchedulerState, request: Request, *, error: EngineError, out: list[Instruction]) -> None:
    """End an accepted request with an error; its last word."""
    _remove(state, request)
    refuse(state, request.spec, error=error, out=out)


def refuse(state: SchedulerState, spec: RequestSpec, *, error: EngineError, out: list[Instruction]) -> None:
    """Answer with an error."""
    state.counters.refused[error.reason] = state.counters.refused.get(error.reason, 0) + 1
    out.append(RequestRefused(spec.stream, error))


def _remove(state: SchedulerState, request: Request) -> None:
    if request.status is RequestStatus.WAITING:
        state.waiting.remove(request)
    else:
        _leave_worker(state, request)
    del state.streams[request.spec.stream]
    request.attempt += 1
    request.move_to(RequestStatus.FINISHED)


def _leave_worker(state: SchedulerState, request: Request) -> None:
    holding = request.holding
    assert holding is not None
    worker = state.workers[holding.key.worker]
    worker.memory.release(holding)
    del worker.running[request.handle]
    request.holding = None
