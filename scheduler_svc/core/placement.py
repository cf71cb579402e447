"""Which waiting requests go to which worker now: where most of their tokens are cached, then the least loaded one.

A request that finds no room on the workers it would fit closes them for everybody behind it. A request whose next page
another one is computing waits for it without pages, closes nothing, and is looked at again in every step.
"""

from collections.abc import Iterator

from scheduler_svc.core.batching import prefills
from scheduler_svc.core.events import Instruction
from scheduler_svc.core.outlook import Outlook
from scheduler_svc.core.policy import QueueView
from scheduler_svc.core.queue_hint import queue_full
from scheduler_svc.core.request import Request
from scheduler_svc.core.reserve import reserve_target
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.transitions import fail, place, requeue
from scheduler_svc.core.wait_reasons import LastLook, WaitReason, weightiest
from scheduler_svc.core.worker_state import WorkerState
from scheduler_svc.memory.prefix_match import PrefixMatch

_MOST_PASSED_OVER = 256
"""Requests that wait for another's prefix and are passed over in one step, so that its cost is bounded."""


class _Desk:
    """A worker in this pass. Makes no decision about order."""

    def __init__(self, worker: WorkerState, state: SchedulerState) -> None:
        self.worker = worker
        self._state = state
        self.outlook: Outlook | None = None
        """Of an open one."""
        self._spare: list[int] = []
        """Pages per sub-pool that are left after what the running requests are expected to need."""
        self._backlog = sum(_left_to_plan(request) for request in worker.running.values() if prefills(request))
        if self.is_open:
            self._spare = self._count_spare()
            self.outlook = state.foresight.outlook(worker, now=state.now)

    @property
    def is_open(self) -> bool:
        """Whether a request placed now would start in the next plan."""
        return not self.has_no_row and self._backlog < self.worker.budget_tokens

    @property
    def has_no_row(self) -> bool:
        """Whether the worker has as many requests as it may have."""
        return len(self.worker.running) >= self.worker.row_limit

    @property
    def closed_for(self) -> WaitReason:
        """Why it is not open."""
        return WaitReason.ROWS if self.has_no_row else WaitReason.BUDGET

    @property
    def load(self) -> tuple[int, int]:
        """Lower is better: most spare pages, then fewest requests."""
        return -min(self._spare), len(self.worker.running)

    def suits(self, request: Request) -> bool:
        """Whether the request could ever run here."""
        limits = self.worker.info.limits
        fits_context = request.prompt_len + request.spec.max_tokens <= limits.context_tokens
        fits_memory = self.worker.memory.capacity.tokens >= request.final_kv_len
        return fits_context and fits_memory and self.worker.plan_size.takes(request.spec)

    def match(self, request: Request) -> PrefixMatch:
        """What is cached of the request here."""
        memory, domain = self.worker.memory, request.spec.isolation_domain
        if not request.cache_use.is_trusting:
            return PrefixMatch(memory.cache, domain)
        matches = request.cache_use.matches
        known = matches.get(self.worker.name)
        match = memory.match(domain, request.tokens, known, most_tokens=request.cached_limit)
        matches[self.worker.name] = match
        return match

    def can_take(self, request: Request, match: PrefixMatch) -> bool:
        """Whether there are pages for it and its reserve; an empty worker takes whatever suits it."""
        target = self._target(request) if self.worker.running else request.sampled_len
        has_pages = all(need <= spare for need, spare in zip(self._needs(target, match), self._spare, strict=True))
        return has_pages and (self.outlook is None or self.outlook.has_room(request))

    def is_too_late_for(self, request: Request) -> bool:
        """Whether it is known that the request could not be done in time here, placed now."""
        return self.outlook is not None and self.outlook.is_late(request)

    def take(self, request: Request, match: PrefixMatch) -> None:
        """Place it and count it."""
        needs = self._needs(self._target(request), match)
        self._spare = [spare - need for spare, need in zip(self._spare, needs, strict=True)]
        place(self._state, request, self.worker, match=match)
        self._backlog += _left_to_plan(request)
        if self.outlook is not None:
            self.outlook.add(request)

    def _target(self, request: Request) -> int:
        return reserve_target(request, self._state.new_token_ratio, self._state.settings)

    def _needs(self, target: int, match: PrefixMatch) -> list[int]:
        memory = self.worker.memory
        return [need - shared for need, shared in zip(memory.demand.most(target), memory.shared(match), strict=True)]

    def _count_spare(self) -> list[int]:
        memory = self.worker.memory
        running = [request for request in self.worker.running.values() if not request.standing.is_paused]
        targets = [self._target(request) for request in running]
        further = memory.demand.further([request.holding for request in running if request.holding], targets)
        return [available - need for available, need in zip(memory.available(), further, strict=True)]


class _Pass:
    """One pass over the queue: who is placed, which workers are closed, and why the others wait."""

    def __init__(self, state: SchedulerState) -> None:
        self.desks = [_Desk(worker, state) for worker in _open_workers(state)]
        self.full = {desk.worker.name for desk in self.desks if desk.has_no_row}
        """The workers that had no pages or rows left for somebody who waits."""
        self.placed: list[tuple[Request, float]] = []
        self.late: list[Request] = []
        """Those that could not be done in time any more."""
        self.look = LastLook()
        self._state = state
        self._closed = {desk.worker.name: desk.closed_for for desk in self.desks if not desk.is_open}
        self._passed_over = 0

    @property
    def is_over(self) -> bool:
        """Whether looking at more requests would place none, or cost too much."""
        return len(self._closed) == len(self.desks) or self._passed_over > _MOST_PASSED_OVER

    def offer(self, request: Request) -> None:
        """Place the request, or note why it waits."""
        suitable = [(desk, desk.match(request)) for desk in self._suiting(request)]
        if _is_awaited(suitable):
            self._passed_over += 1
            self.look.reasons[request.handle] = WaitReason.PREFIX
            return
        if suitable and all(desk.is_too_late_for(request) for desk, _ in suitable):
            self.late.append(request)
            return
        taker = _try_to_place(request, [offer for offer in suitable if offer[0].worker.name not in self._closed])
        if taker is None:
            self._close([desk.worker.name for desk, _ in suitable], request)
            return
        state = self._state
        self.placed.append((request, reserve_target(request, state.new_token_ratio, state.settings) - request.kv_len))
        if not taker.is_open:
            self._closed[taker.worker.name] = taker.closed_for

    def _suiting(self, request: Request) -> list[_Desk]:
        """After bad numbers another worker, where there is one."""
        suiting = [desk for desk in self.desks if desk.suits(request)]
        elsewhere = [desk for desk in suiting if desk.worker.name != request.trouble.avoids]
        return elsewhere or suiting

    def end(self) -> None:
        """Take those who were placed out of the queue, and keep what was seen."""
        state = self._state
        for request, tokens in self.placed:
            state.waiting.remove_placed(request, tokens=tokens)
        is_cut = len(self._closed) < len(self.desks)
        self.look.others = WaitReason.PREFIX if is_cut else weightiest(self._closed.values())
        state.last_look = self.look

    def _close(self, names: list[str], request: Request) -> None:
        """No worker that suits the request has room: none of them takes another before it."""
        unable = [name for name in names if name not in self._closed]
        self.full.update(unable)
        self._closed.update(dict.fromkeys(unable, WaitReason.PAGES))
        self.look.reasons[request.handle] = weightiest(self._closed[name] for name in names)


def _open_workers(state: SchedulerState) -> list[WorkerState]:
    """Those that are beyond doubt; all, if none is."""
    everyone = list(state.workers.values())
    return [worker for worker in everyone if worker.standing.is_open(state.now)] or everyone


def admit_waiting(state: SchedulerState, out: list[Instruction]) -> None:
    """Place as many waiting requests as there is room for, if need be in place of paused ones.

    What could not be done in time any more when its turn comes is refused: others will be.
    """
    if not len(state.waiting):
        return
    if not state.workers:
        state.last_look = LastLook()
        return
    full = _place_waiting(state, out)
    paused = [
        request for name in full for request in state.workers[name].running.values() if request.standing.is_paused
    ]
    for request in paused:
        requeue(state, request)
        state.counters.retractions += 1
    if paused:
        _place_waiting(state, out)


def _place_waiting(state: SchedulerState, out: list[Instruction]) -> set[str]:
    """The workers that had no pages or rows left for somebody who waits."""
    this = _Pass(state)
    for request in _in_order(state, this.desks):
        if this.is_over:
            break
        if not request.awaits_mask:
            this.offer(request)
    this.end()
    for request in this.late:
        message = "it cannot be done any more in the time that is left of its deadline"
        fail(state, request, error=queue_full(state, request.spec, message=message, field="deadline"), out=out)
    return this.full


def _in_order(state: SchedulerState, desks: list[_Desk]) -> Iterator[Request]:
    def cached_tokens(request: Request) -> int:
        return max(desk.match(request).pages * desk.worker.memory.page_size for desk in desks)

    def expected_tokens(request: Request) -> int:
        return reserve_target(request, state.new_token_ratio, state.settings)

    return state.waiting.in_order(QueueView(state.now, cached_tokens, expected_tokens))


def _is_awaited(offers: list[tuple[_Desk, PrefixMatch]]) -> bool:
    """Whether some worker is about to have more of the request than any worker has now."""
    most = max((match.pages for _, match in offers), default=0)
    return any(match.is_upcoming and match.pages >= most for _, match in offers)


def _try_to_place(request: Request, offers: list[tuple[_Desk, PrefixMatch]]) -> _Desk | None:
    """Place the request on the best of the workers that can take it; None if none can."""
    able = [(desk, match) for desk, match in offers if desk.can_take(request, match)]
    if not able:
        return None
    desk, match = min(able, key=lambda offer: (-offer[1].pages, offer[0].load))
    desk.take(request, match)
    return desk


def _left_to_plan(request: Request) -> int:
    return request.sampled_len - request.planned_len
