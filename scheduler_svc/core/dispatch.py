"""One more plan for one worker: choose its rows, build it, send it, and remember what is in flight."""

from scheduler_svc.core.batch import Batch, PlanInFlight
from scheduler_svc.core.batching import next_batch
from scheduler_svc.core.events import Instruction, SendPlan
from scheduler_svc.core.plan_builder import build_plan
from scheduler_svc.core.plan_deadline import plan_budget_ms
from scheduler_svc.core.request import RequestStatus
from scheduler_svc.core.reserve import decay_ratio
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.worker_state import WorkerState


def send_next(state: SchedulerState, worker: WorkerState, out: list[Instruction]) -> bool:
    """Send the worker one plan; False if its window is full or there is nothing to compute."""
    if not worker.has_room:
        return False
    batch = next_batch(state, worker)
    if batch is None:
        return False
    shape = batch.shape()
    unmeasured_ms = state.settings.plan_budget_ms
    budget_ms = plan_budget_ms(worker.cost, shape, device=worker.info.device, unmeasured_ms=unmeasured_ms)
    plan = build_plan(worker, batch, budget_ms=budget_ms)
    out.append(SendPlan(worker.name, plan))
    rows = plan.rows
    worker.in_flight.append(
        PlanInFlight(
            seq=worker.next_seq,
            rows=batch.rows(),
            handles=rows.handles,
            attempts=rows.attempts,
            positions=rows.seq_lens - 1,
            shape=shape,
            predicted_s=worker.cost.predict_s(shape) or None if worker.cost.knows(shape) else None,
        )
    )
    _mark_planned(worker, batch)
    worker.next_seq += 1
    _count(state, batch, num_tokens=shape.tokens)
    return True


def _mark_planned(worker: WorkerState, batch: Batch) -> None:
    seq = worker.next_seq
    for index, row in enumerate(batch.rows()):
        request = row.request
        request.planned_len = row.seq_len
        request.standing.planned_seq = seq
        if row.samples:
            request.sample_source = (seq, index)
    for row in batch.extend:
        if row.samples:
            row.request.move_to(RequestStatus.RUNNING)


def _count(state: SchedulerState, batch: Batch, *, num_tokens: int) -> None:
    counters = state.counters
    counters.plans += 1
    counters.rows += len(batch.decode) + len(batch.extend)
    counters.decode_tokens += len(batch.decode)
    counters.prefill_tokens += num_tokens - len(batch.decode)
    if batch.decode:
        decay_ratio(state)
