"""What the core knows of one attached worker: its answer to Attach, its memory, the requests on it, plans in flight."""

from collections import deque
from dataclasses import dataclass, field

from protos.wire.enums import Feature, ForwardMode
from protos.wire.errors import UnsupportedFeature
from protos.wire.limits import MAX_PLAN_ROWS, MAX_PLAN_TOKENS, MAX_WINDOW
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.batch import PlanInFlight
from scheduler_svc.core.budget import BudgetRule, budget_rule
from scheduler_svc.core.cost_model import CostModel, PlanShape
from scheduler_svc.core.events import WorkerAttached
from scheduler_svc.core.request import Request
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.memory.page_holding import MemoryKey
from scheduler_svc.memory.worker_memory import WorkerMemory, check_geometry

_MODES = (ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED)


@dataclass(slots=True, eq=False)
class WorkerState:
    """One term of one worker. A new attach makes a new object."""

    name: str
    info: WorkerInfo
    epoch: int
    term: int
    memory: WorkerMemory
    window: int
    budget_rule: BudgetRule
    budget_tokens: int
    """Prefill tokens a plan now, at least one page."""
    token_limit: int
    """All tokens a plan."""
    row_limit: int
    """Most requests on the worker; leaves room for one page of prefill beside them."""
    resolves_references: bool
    cost: CostModel = field(default_factory=CostModel)
    next_seq: int = 1
    running: dict[int, Request] = field(default_factory=dict)
    """By handle, in order of admission."""
    in_flight: deque[PlanInFlight] = field(default_factory=deque)

    def measured(self, shape: PlanShape, seconds: float) -> None:
        """A plan took so long on the device."""
        self.cost.observe(shape, seconds)
        self.budget_tokens = self.budget_rule.tokens(self.cost)

    @property
    def has_room(self) -> bool:
        """Whether one more plan may be sent."""
        return len(self.in_flight) < self.window


def check_worker(info: WorkerInfo) -> None:
    """That the core can plan for this worker. Asked before `WorkerAttached` is handed to the core.

    Raises:
        UnsupportedFeature: a sub-pool, mode or limit the core has no plans for.
    """
    check_geometry(info.sub_pools)
    page_size = info.sub_pools[0].page_size
    if info.limits.max_tokens <= page_size:
        message = f"max_tokens {info.limits.max_tokens} must be above the page size {page_size}"
        raise UnsupportedFeature(message, field="limits.max_tokens")
    missing = [mode.name for mode in _MODES if mode not in info.modes]
    if missing:
        raise UnsupportedFeature(f"the worker lacks forward mode {missing[0]}", field="modes")


def attach(event: WorkerAttached, settings: CoreSettings) -> WorkerState:
    """A worker with empty memory and nothing in flight."""
    info = event.info
    check_worker(info)
    page_size = info.sub_pools[0].page_size
    token_limit = min(info.limits.max_tokens, MAX_PLAN_TOKENS)
    window = max(1, min(info.limits.window, MAX_WINDOW))
    rule = budget_rule(settings, info, token_limit=token_limit, window=window)
    key = MemoryKey(event.worker, 0)
    return WorkerState(
        name=event.worker,
        info=info,
        epoch=event.epoch,
        term=event.term,
        memory=WorkerMemory(key, info.sub_pools, slack_tokens=window * rule.most),
        window=window,
        budget_rule=rule,
        budget_tokens=rule.first,
        token_limit=token_limit,
        row_limit=max(1, min(info.limits.max_rows, MAX_PLAN_ROWS, token_limit - page_size + 1)),
        resolves_references=Feature.TOKEN_REFERENCES in info.features,
    )
