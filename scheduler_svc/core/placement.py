"""Which waiting requests go to which worker now. First come, first served; the least loaded worker that has room.

A request that finds no room on the workers it would fit closes them for everybody behind it.
"""

from scheduler_svc.core.policy import reserve_target
from scheduler_svc.core.request import Request, RequestStatus
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.transitions import place
from scheduler_svc.core.worker_state import WorkerState


class _Desk:
    """A worker that may take requests in this pass. Makes no decision about order."""

    def __init__(self, worker: WorkerState, state: SchedulerState) -> None:
        self.worker = worker
        self._ratio = state.new_token_ratio
        self._settings = state.settings
        self._spare: list[int] = []
        """Free pages per sub-pool after what the running requests are expected to need."""
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

    def can_take(self, request: Request) -> bool:
        """Whether there are pages for it and its reserve; an empty worker takes whatever suits it."""
        needs = self._needs(request)
        if not self.worker.running:
            needs = self.worker.memory.demand(request.sampled_len)
        return all(need <= spare for need, spare in zip(needs, self._spare, strict=True))

    def take(self, request: Request) -> None:
        """Place it and count it."""
        self._spare = [spare - need for spare, need in zip(self._spare, self._needs(request), strict=True)]
        self._backlog += request.sampled_len
        place(request, self.worker)

    def _needs(self, request: Request) -> list[int]:
        return self.worker.memory.demand(reserve_target(request, self._ratio, self._settings))

    def _count_spare(self) -> list[int]:
        memory = self.worker.memory
        running = self.worker.running.values()
        targets = [reserve_target(request, self._ratio, self._settings) for request in running]
        further = memory.further_demand([request.holding for request in running if request.holding], targets)
        return [free - need for free, need in zip(memory.free(), further, strict=True)]


def admit_waiting(state: SchedulerState) -> None:
    """Place as many waiting requests as there is room for."""
    if not len(state.waiting) or not state.workers:
        return
    desks = [desk for worker in state.workers.values() if (desk := _Desk(worker, state)).is_open]
    placed: list[Request] = []
    for request in state.waiting:
        if not desks:
            break
        if request.awaits_mask:
            continue
        suitable = [desk for desk in desks if desk.suits(request)]
        able = [desk for desk in suitable if desk.can_take(request)]
        if able:
            min(able, key=lambda desk: desk.load).take(request)
            placed.append(request)
            desks = [desk for desk in desks if desk.is_open]
        else:
            desks = [desk for desk in desks if desk not in suitable]
    for request in placed:
        state.waiting.remove(request)


def _left_to_plan(request: Request) -> int:
    return request.sampled_len - request.planned_len if request.status is RequestStatus.PREFILLING else 0
