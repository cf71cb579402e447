"""What the core knows of one attached worker: its answer to Attach, its memory, the requests on it, plans in flight."""

from collections import deque
from dataclasses import dataclass, field

from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.batch import PlanInFlight
from scheduler_svc.core.budget import BudgetRule
from scheduler_svc.core.cost_model import CostModel, PlanShape
from scheduler_svc.core.plan_size import PlanSize
from scheduler_svc.core.request import Request
from scheduler_svc.memory.worker_memory import WorkerMemory


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
    plan_size: PlanSize
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
