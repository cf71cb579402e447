"""How a request changes hands: to a worker, back to the queue, back on its pages, and out.

The only code that moves a request between queue, worker and end, so pages have one release path.
"""

import heapq
from collections.abc import Sequence

from protos.wire.enums import FinishReason
from protos.wire.errors import EngineError
from scheduler_svc.core.events import Instruction, PromptAnswered, RequestFinished, RequestRefused, RequestSpec, Usage
from scheduler_svc.core.prompt_account import InputAnswer
from scheduler_svc.core.request import Request, RequestStatus, new_request
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.worker_state import WorkerState
from scheduler_svc.memory.prefix_match import PrefixMatch


def accept(state: SchedulerState, spec: RequestSpec, *, output_ids: Sequence[int] = ()) -> Request:
    """A new request, behind all that wait; `output_ids` are known of its output."""
    request = new_request(spec, state.next_handle, now=state.now, output_ids=output_ids)
    state.next_handle += 1
    request.standing.expected_output = state.foresight.outputs.expected(spec.max_tokens)
    state.streams[spec.stream] = request
    state.waiting.append(request)
    heapq.heappush(state.deadlines, (spec.deadline_s, request.handle, request))
    state.counters.prompt_tokens += request.prompt_len
    return request


def place(state: SchedulerState, request: Request, worker: WorkerState, *, match: PrefixMatch) -> None:
    """Reserve pages for all known tokens on the worker, behind what is cached of them.

    The caller takes the request out of the queue.
    """
    use, memory = request.cache_use, worker.memory
    request.move_to(RequestStatus.PREFILLING)
    request.holding = memory.reserve(request.tokens, match, trusts_cache=use.is_trusting)
    request.kv_len = request.planned_len = len(request.holding.path) * memory.page_size
    request.standing.planned_seq = 0
    worker.running[request.handle] = request
    if request.trouble.alone_until:
        worker.standing.struck[request.handle] = request
    use.matches.clear()
    state.counters.cache.queried_tokens += request.sampled_len
    state.counters.cache.hit_tokens += request.kv_len
    if use.cached_tokens is None:
        use.cached_tokens = min(request.kv_len, request.prompt_len)
        state.counters.cache.prompt_tokens += use.cached_tokens
        state.foresight.prompts.placed(request.prompt_len, cached_tokens=use.cached_tokens)


def requeue(state: SchedulerState, request: Request) -> None:
    """Off its worker and back into the queue by seniority, outputs kept, nothing of its KV."""
    _leave_worker(state, request)
    request.void_plans(kv_len=0)
    request.move_to(RequestStatus.WAITING)
    state.waiting.put_back(request)


def distrust(state: SchedulerState, request: Request) -> None:
    """Bad numbers: take every page the request uses out of its worker's cache, and let it use no other's."""
    assert request.holding is not None
    state.workers[request.holding.key.worker].memory.distrust(request.holding)
    request.cache_use.is_trusting = False
    if request.account is not None:
        request.account.forget()


def pause(state: SchedulerState, request: Request) -> None:
    """The reader has fallen behind: no more plans for it, and all others are older than it from now on."""
    standing = request.standing
    if standing.is_paused:
        return
    waits = request.status is RequestStatus.WAITING
    if waits:
        state.waiting.remove(request)
    standing.is_paused = True
    standing.queued_at = state.now
    standing.seniority = state.next_handle
    state.next_handle += 1
    if waits:
        state.waiting.append(request)
    elif request.holding is not None:
        state.workers[request.holding.key.worker].memory.announce(request.holding, None)


def resume(state: SchedulerState, request: Request) -> None:
    """The reader has caught up."""
    if not request.standing.is_paused:
        return
    waits = request.status is RequestStatus.WAITING
    if waits:
        state.waiting.remove(request)
    request.standing.is_paused = False
    if waits:
        state.waiting.append(request)
    elif request.holding is not None:
        state.workers[request.holding.key.worker].memory.announce(request.holding, request.tokens)


def rewind(request: Request) -> None:
    """Plan again from `kv_len`, on the same pages; what is in flight no longer counts."""
    request.void_plans(request.kv_len)
    only_newest_left = request.kv_len + 1 == request.sampled_len and request.output_len > 0
    status = RequestStatus.RUNNING if only_newest_left else RequestStatus.PREFILLING
    if status is not request.status:
        request.move_to(status)


def take_inputs(state: SchedulerState, request: Request, given: InputAnswer | None, *, out: list[Instruction]) -> None:
    """The prompt's positions below `kv_len` are answered; say all when all is there, and end who wanted no more."""
    account = request.account
    assert account is not None
    account.take(given, end=request.kv_len)
    if not account.is_complete:
        return
    stream = request.spec.stream
    out.append(PromptAnswered(stream=stream, logprobs=account.logprobs(), states=account.prompt_states()))
    account.told()
    if request.is_prefill_only:
        finish(state, request, reason=FinishReason.LENGTH, out=out)


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
    state.foresight.outputs.ended(request.output_len, by_itself=reason is FinishReason.STOP)
    usage = Usage(
        prompt_tokens=request.prompt_len,
        cached_tokens=request.cache_use.cached_tokens or 0,
        output_tokens=request.output_len,
    )
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
    worker.standing.struck.pop(request.handle, None)
    request.holding = None
