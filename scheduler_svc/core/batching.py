"""Which rows the next plan of a worker carries.

Every decode row that can go on rides in every plan and does not count towards the budget, so a decode row never waits
for prefill. The budget buys prefill beside them: chunks that end on page borders, or at the end of what is known.
"""

from collections.abc import Iterable

from scheduler_svc.core.batch import Batch, PlannedRow
from scheduler_svc.core.input_columns import InputRoom
from scheduler_svc.core.request import Request, RequestStatus
from scheduler_svc.core.reserve import choose_victim, raise_ratio
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.transitions import requeue
from scheduler_svc.core.worker_state import WorkerState

# Read once: a member of an enum costs a look-up in Python, and these are compared for every row of every plan.
_RUNNING = RequestStatus.RUNNING
_PREFILLING = RequestStatus.PREFILLING


def next_batch(state: SchedulerState, worker: WorkerState) -> Batch | None:
    """The rows of the worker's next plan; None if there is nothing to compute. Takes their pages."""
    if worker.standing.struck:
        return _next_apart(state, worker)
    return _batch_of(state, worker, worker.running.values())


def _next_apart(state: SchedulerState, worker: WorkerState) -> Batch | None:
    """While some must be alone on the device: one plan in flight, of one of them or of all others, in turns."""
    if worker.in_flight:
        return None
    struck = list(worker.standing.struck.values())
    others = [request for request in worker.running.values() if request.handle not in worker.standing.struck]
    groups = [others, *([request] for request in struck)]
    if not worker.standing.was_alone:
        groups = [*groups[1:], others]
    for group in groups:
        batch = _batch_of(state, worker, group)
        if batch is not None:
            worker.standing.was_alone = group is not others
            return batch
    return None


def _batch_of(state: SchedulerState, worker: WorkerState, requests: Iterable[Request]) -> Batch | None:
    candidates = list(requests)
    decode = _decode_rows(state, worker, candidates)
    extend = _extend_rows(state, worker, candidates, num_decode=len(decode))
    batch = worker.plan_size.fitted(Batch(decode=_still_current(decode), extend=_still_current(extend)))
    return batch if batch.decode or batch.extend else None


def chunk_end(begin: int, *, known: int, budget: int, page_size: int) -> int:
    """End of the chunk that starts at `begin`; at most `begin` if the budget buys nothing."""
    if known - begin <= budget:
        return known
    return (begin + budget) // page_size * page_size


def prefills(request: Request) -> bool:
    """Whether a request on a worker asks for chunks of the budget."""
    is_prefilling = request.status is _PREFILLING and not request.standing.is_paused
    return is_prefilling and request.planned_len < request.sampled_len  # all of a prefill-only one may be in flight


def _decode_rows(state: SchedulerState, worker: WorkerState, candidates: list[Request]) -> list[PlannedRow]:
    rows: list[PlannedRow] = []
    resolves_references = worker.resolves_references
    for request in candidates:
        if request.status is not _RUNNING or request.standing.is_paused:
            continue
        position = request.planned_len
        if position >= request.final_kv_len or (request.rules is not None and request.awaits_mask):
            continue
        source = None
        if position >= len(request.tokens):
            if not resolves_references or not request.may_reference:
                continue
            source = request.sample_source
        holding = request.holding
        assert holding is not None
        if position >= holding.allocated_len and not _has_pages(state, worker, request, seq_len=position + 1):
            continue
        rows.append(PlannedRow(request, request.attempt, position, position + 1, samples=True, source=source))
    return rows


def _extend_rows(
    state: SchedulerState, worker: WorkerState, candidates: list[Request], *, num_decode: int
) -> list[PlannedRow]:
    rows: list[PlannedRow] = []
    budget = min(worker.budget_tokens, worker.token_limit - num_decode)
    room = InputRoom(worker.info)
    prefilling = [request for request in candidates if prefills(request)]
    for request in prefilling:
        if request.status is not _PREFILLING:  # retracted for the pages of one before it
            continue
        begin, known = request.planned_len, request.sampled_len
        end = chunk_end(begin, known=known, budget=budget, page_size=worker.memory.page_size)
        if end <= begin:
            break
        most = room.most_tokens(request)
        if most is not None and end - begin > most:
            end = chunk_end(begin, known=known, budget=most, page_size=worker.memory.page_size)
        if end > begin and _has_pages(state, worker, request, seq_len=end):
            budget -= end - begin
            samples = end == known and not request.is_prefill_only
            rows.append(PlannedRow(request, request.attempt, begin, seq_len=end, samples=samples, source=None))
            room.take(rows[-1])
    return rows


def _has_pages(state: SchedulerState, worker: WorkerState, request: Request, *, seq_len: int) -> bool:
    """Pages for the row, by retracting others if need be. False if the request itself was retracted."""
    holding = request.holding
    assert holding is not None
    if seq_len <= holding.allocated_len:
        return True
    while not worker.memory.can_grow(holding, seq_len):
        victim = choose_victim(list(worker.running.values()))
        assert victim is not None, "the oldest request does not fit a pool it was admitted to"
        requeue(state, victim)
        state.counters.retractions += 1
        if not victim.standing.is_paused:
            raise_ratio(state, list(worker.running.values()))
        if victim is request:
            return False
    worker.memory.grow(holding, seq_len)
    return True


def _still_current(rows: list[PlannedRow]) -> list[PlannedRow]:
    """Without rows whose request was retracted for another's pages after they were chosen."""
    return [row for row in rows if row.attempt == row.request.attempt]
