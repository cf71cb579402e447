"""Which waiting requests go to which worker now: where most of their tokens are cached, then the least loaded one.

A request that finds no room on the workers it would fit closes them for everybody behind it. A request whose next page
another one is computing waits for it without pages, closes nothing, and is looked at again in every step.
"""

from scheduler_svc.core.policy import reserve_target
from scheduler_svc.core.request import Request, RequestStatus
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.transitions import place
from scheduler_svc.core.worker_state import WorkerState
from scheduler_svc.memory.prefix_match import PrefixMatch

_MOST_PASSED_OVER = 256
"""Requests that wait for another's prefix and are passed over in one step, so that its cost is bounded."""


class _Desk:
    """A worker in this pass. Makes no decision about order."""

    def __init__(self, worker: WorkerState, state: SchedulerState) -> None:
        self.worker = worker
        self._state = state
        self._spare: list[int] = []
        """Pages per sub-pool that are left after what the running requests are expected to need."""
        self._backlog = sum(_left_to_plan(request) for request in worker.running.values())
        if self.is_open:
            self._spare = self._count_spare()

    @property
    def is_open(self) -> bool:
        """Whether a request placed now would start in the next plan."""
        return len(self.worker.running) < self.worker.row_limit and self._backlog < self.worker.budget_tokens

    @property
    def load(self) -> tuple[int, int]:
        """Lower is better: most spare pages, then fewest requests."""
        return -min(self._spare), len(self.worker.running)

    def suits(self, request: Request) -> bool:
        """Whether the request could ever run here."""
        limits = self.worker.info.limits
        fits_context = request.final_kv_len < limits.context_tokens
        return fits_context and self.worker.memory.capacity_tokens >= request.final_kv_len

    def match(self, request: Request) -> PrefixMatch:
        """What is cached of the request here."""
        memory, domain = self.worker.memory, request.spec.isolation_domain
        if not request.cache_use.is_trusting:
            return PrefixMatch(memory.cache, domain)
        matches = request.cache_use.matches
        match = memory.match(domain, request.tokens, matches.get(self.worker.name))
        matches[self.worker.name] = match
        return match

    def can_take(self, request: Request, match: PrefixMatch) -> bool:
        """Whether there are pages for it and its reserve; an empty worker takes whatever suits it."""
        target = self._target(request) if self.worker.running else request.sampled_len
        return all(need <= spare for need, spare in zip(self._needs(target, match), self._spare, strict=True))

    def take(self, request: Request, match: PrefixMatch) -> None:
        """Place it and count it."""
        needs = self._needs(self._target(request), match)
        self._spare = [spare - need for spare, need in zip(self._spare, needs, strict=True)]
        place(self._state, request, self.worker, match=match)
        self._backlog += _left_to_plan(request)

    def _target(self, request: Request) -> int:
        return reserve_target(request, self._state.new_token_ratio, self._state.settings)

    def _needs(self, target: int, match: PrefixMatch) -> list[int]:
        memory = self.worker.memory
        return [need - shared for need, shared in zip(memory.demand(target), memory.shared(match), strict=True)]

    def _count_spare(self) -> list[int]:
        memory = self.worker.memory
        running = self.worker.running.values()
        targets = [self._target(request) for request in running]
        further = memory.further_demand([request.holding for request in running if request.holding], targets)
        return [available - need for available, need in zip(memory.available(), further, strict=True)]


def admit_waiting(state: SchedulerState) -> None:
    """Place as many waiting requests as there is room for."""
    if not len(state.waiting) or not state.workers:
        return
    desks = [_Desk(worker, state) for worker in state.workers.values()]
    closed = {desk.worker.name for desk in desks if not desk.is_open}
    passed_over = 0
    placed: list[Request] = []
    for request in state.waiting:
        if len(closed) == len(desks) or passed_over > _MOST_PASSED_OVER:
            break
        suitable = [(desk, desk.match(request)) for desk in desks if desk.suits(request)]
        if _is_awaited(suitable):
            passed_over += 1
            continue
        names = _try_to_place(request, suitable, closed)
        if request.status is not RequestStatus.WAITING:
            placed.append(request)
        closed |= names
    for request in placed:
        state.waiting.remove(request)


def _is_awaited(offers: list[tuple[_Desk, PrefixMatch]]) -> bool:
    """Whether some worker is about to have more of the request than any worker has now."""
    most = max((match.pages for _, match in offers), default=0)
    return any(match.is_upcoming and match.pages >= most for _, match in offers)


def _try_to_place(request: Request, offers: list[tuple[_Desk, PrefixMatch]], closed: set[str]) -> set[str]:
    """Place the request on the best worker that can take it; the workers that are closed by that."""
    open_offers = [(desk, match) for desk, match in offers if desk.worker.name not in closed]
    able = [(desk, match) for desk, match in open_offers if desk.can_take(request, match)]
    if not able:
        return {desk.worker.name for desk, _ in open_offers}
    desk, match = min(able, key=lambda offer: (-offer[1].pages, offer[0].load))
    desk.take(request, match)
    return set() if desk.is_open else {desk.worker.name}


def _left_to_plan(request: Request) -> int:
    return request.sampled_len - request.planned_len if request.status is RequestStatus.PREFILLING else 0
