"""What the core knows of one attached worker: its answer to Attach, its memory, the requests on it, plans in flight."""

from collections import deque
from dataclasses import dataclass, field

from protos.wire.enums import Feature
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.batch import PlanInFlight
from scheduler_svc.core.budget import BudgetRule
from scheduler_svc.core.cost_model import CostModel, PlanShape
from scheduler_svc.core.plan_size import PlanSize
from scheduler_svc.core.request import Request
from scheduler_svc.memory.worker_memory import WorkerMemory

QUARANTINE_REQUESTS = 3
"""Different requests with bad numbers within the window: one alone may have itself to blame."""
QUARANTINE_WINDOW_S = 60.0


@dataclass(slots=True)
class WorkerStanding:
    """Whether new requests should go to the worker, and whose turn it is while some must be alone."""

    is_doubted: bool = False
    bad_rows: deque[tuple[float, int]] = field(default_factory=deque)
    """When, and of which request, numbers were bad; oldest first."""
    struck: dict[int, Request] = field(default_factory=dict)
    """Of those running, by handle: who must be alone on the device."""
    was_alone: bool = False
    """The last plan had a struck request alone, though others could have had it."""

    def note_bad_numbers(self, handle: int, now: float) -> None:
        """A row of that request was not finite, or its pages were not what they should be."""
        self.bad_rows.append((now, handle))

    def is_quarantined(self, now: float) -> bool:
        """Whether its device is under suspicion."""
        while self.bad_rows and self.bad_rows[0][0] <= now - QUARANTINE_WINDOW_S:
            self.bad_rows.popleft()
        return len(self.bad_rows) >= QUARANTINE_REQUESTS <= len({handle for _, handle in self.bad_rows})

    def is_open(self, now: float) -> bool:
        """Whether new requests should go to the worker."""
        return not self.is_doubted and not self.is_quarantined(now)


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
    cost: CostModel = field(default_factory=CostModel)
    next_seq: int = 1
    running: dict[int, Request] = field(default_factory=dict)
    """By handle, in order of admission."""
    in_flight: deque[PlanInFlight] = field(default_factory=deque)
    standing: WorkerStanding = field(default_factory=WorkerStanding)

    def measured(self, shape: PlanShape, seconds: float) -> None:
        """A plan took so long on the device."""
        self.cost.observe(shape, seconds)
        self.budget_tokens = self.budget_rule.tokens(self.cost)

    def clear_strikes(self, request: Request) -> None:
        """The request's KV has grown; if that is past where a worker died, it may share the device again."""
        if request.handle in self.standing.struck and request.kv_len >= request.trouble.alone_until:
            request.trouble.strikes = request.trouble.alone_until = 0
            del self.standing.struck[request.handle]

    @property
    def resolves_references(self) -> bool:
        """Whether a row may go on from a token that an earlier plan samples."""
        return Feature.TOKEN_REFERENCES in self.info.features

    @property
    def has_room(self) -> bool:
        """Whether one more plan may be sent."""
        return len(self.in_flight) < self.window
