"""What a result does to requests: tokens committed and released, failed rows retried, late rows dropped.

A row counts only if handle, attempt and position are those planned, and the request's attempt is still the row's.
"""

from protos.wire.enums import FinishReason, RowFailure
from protos.wire.errors import DataFault, EngineError, InternalFault, InvalidRequest
from protos.wire.result import ForwardResult, PlanRejection, PlanTimings
from scheduler_svc.core.batch import PlanInFlight, PlannedRow
from scheduler_svc.core.events import Instruction, PlanTimed, ResultReceived, TokenLogprob, TokensReleased
from scheduler_svc.core.request import Request
from scheduler_svc.core.result_rows import read_answers
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.stopping import finish_reason
from scheduler_svc.core.transitions import distrust, fail, finish, requeue, rewind, take_inputs
from scheduler_svc.core.worker_state import WorkerState

_BAD_NUMBERS = (RowFailure.NAN, RowFailure.CANARY)


def consume(state: SchedulerState, event: ResultReceived, out: list[Instruction]) -> None:
    """Take the result of the worker's oldest plan in flight; any other result is counted and dropped."""
    worker = state.workers.get(event.worker)
    if worker is None or not _is_next(worker, event.result):
        state.counters.late_results += 1
        return
    plan = worker.in_flight.popleft()
    if event.result.rejection is not None:
        _reject(state, plan, event.result.rejection, out=out)
        return
    measured_s = _device_s(event.result.timings)
    worker.measured(plan.shape, measured_s)
    state.foresight.result(worker, measured_s, now=state.now)
    if plan.predicted_s is not None:
        out.append(PlanTimed(worker.name, plan.predicted_s, measured_s))
    answers = read_answers(plan, event.result, logits_width=worker.info.logits_width)
    for row, token_id, failure, logprobs, inputs in zip(plan.rows, *answers, strict=True):
        request = row.request
        if request.attempt != row.attempt:
            state.counters.late_rows += 1
            continue
        if failure:
            _retry_row(state, request, failure=RowFailure(failure), out=out)
            continue
        _advance(worker, row)
        if request.account is not None:
            take_inputs(state, request, inputs, out=out)
        if row.samples:
            _commit(state, request, token_id=token_id, logprobs=logprobs, out=out)


def _advance(worker: WorkerState, row: PlannedRow) -> None:
    """The row's positions are written."""
    request, memory = row.request, worker.memory
    request.kv_len = row.seq_len
    assert request.holding is not None
    if memory.is_due(row.first_position, row.seq_len):
        memory.commit(request.holding, request.tokens, row.seq_len)
    if worker.standing.struck:
        worker.clear_strikes(request)


def _device_s(timings: PlanTimings) -> float:
    spent = (timings.host_to_device_ns, timings.forward_ns, timings.sample_ns, timings.device_to_host_ns)
    return sum(spent) / 1e9


def _is_next(worker: WorkerState, result: ForwardResult) -> bool:
    identity = result.identity
    expected = (worker.epoch, worker.term, worker.info.incarnation)
    if (identity.epoch, identity.term, identity.incarnation) != expected or not worker.in_flight:
        return False
    return identity.seq == worker.in_flight[0].seq


def _commit(
    state: SchedulerState,
    request: Request,
    *,
    token_id: int,
    logprobs: tuple[TokenLogprob, ...],
    out: list[Instruction],
) -> None:
    position = request.output_len
    request.append(token_id)
    request.trouble.failures = 0
    request.trouble.avoids = ""
    request.cache_use.is_trusting = True
    state.counters.output_tokens += 1
    spec = request.spec
    out.append(TokensReleased(spec.stream, position, (token_id,), logprobs, request.cache_use.cached_tokens or 0))
    reason = finish_reason(spec, token_id, output_len=position + 1)
    if reason is not None:
        stop = token_id if reason is FinishReason.STOP else None
        finish(state, request, reason=reason, out=out, stop_token_id=stop)
        return
    wanted = None if spec.grammar is None else request.mask_wanted()
    if wanted is not None:
        out.append(wanted)


def _retry_row(state: SchedulerState, request: Request, *, failure: RowFailure, out: list[Instruction]) -> None:
    """Try again, from `kv_len`; give up after the allowed retries.

    After bad numbers from nothing: no cached page is used that this attempt or another has computed, and those that
    this attempt used or computed leave the cache, even if it gives up.
    """
    state.counters.failed_rows += 1
    request.trouble.failures += 1
    settings = state.settings
    if failure is RowFailure.NO_CANDIDATE:
        message = f"penalties, bias and limits on tokens leave nothing to sample after {request.output_len} tokens"
        fail(state, request, error=InvalidRequest(message, field="sampling"), out=out)
        return
    bad_numbers = failure in _BAD_NUMBERS
    if bad_numbers:
        distrust(state, request)
        request.trouble.avoids = _blame(state, request)
    if request.trouble.failures > (settings.data_fault_retries if bad_numbers else settings.row_retries):
        fail(state, request, error=_row_error(request, failure), out=out)
    elif bad_numbers:
        requeue(state, request)
    else:
        rewind(request)


def _blame(state: SchedulerState, request: Request) -> str:
    """The worker whose numbers were bad; it is remembered."""
    assert request.holding is not None
    name = request.holding.key.worker
    state.workers[name].standing.note_bad_numbers(request.handle, state.now)
    return name


def _row_error(request: Request, failure: RowFailure) -> EngineError:
    times = request.trouble.failures
    if failure in _BAD_NUMBERS:
        return DataFault(f"the model gave numbers that are not finite, {times} times", field="logits")
    return InternalFault(f"a row failed {times} times, last with {failure.name}", field="row")


def _reject(state: SchedulerState, plan: PlanInFlight, rejection: PlanRejection, *, out: list[Instruction]) -> None:
    """Nothing was executed: the row that is named fails, the others go on from their pages.

    They are not blamed, since the culprit is gone from the next plan. Without a culprit all of them are.
    """
    state.counters.rejected_plans += 1
    for index, row in enumerate(plan.rows):
        if row.request.attempt != row.attempt:
            state.counters.late_rows += 1
        elif index == rejection.row:
            message = f"the worker refused the row: {rejection.field}"
            fail(state, row.request, error=InternalFault(message, field=rejection.field, plan_seq=plan.seq), out=out)
        elif rejection.row is not None and 0 <= rejection.row < len(plan.rows):
            rewind(row.request)
        else:
            _retry_row(state, row.request, failure=RowFailure.LIMIT, out=out)
