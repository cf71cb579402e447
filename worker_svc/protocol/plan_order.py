"""The order of plans within one (epoch, term): what is expected, what waits, what ran, which results are kept.

Guards I8 and I9: a seq is taken at most once, and only after the one before it. Knows nothing of streams or attaches.
"""

from collections import OrderedDict, deque
from enum import Enum, auto

from protos.wire.errors import WindowFull
from protos.wire.limits import MAX_WINDOW
from protos.wire.result import ForwardResult, PlanRejection
from worker_svc.protocol.messages import ArrivedPlan, MissingBase


class Arrival(Enum):
    """What an arriving plan turned out to be."""

    ACCEPTED = auto()
    """Its turn: queued, its result will come."""
    REPEATED = auto()
    """Accepted before and not finished: its result will come, once."""
    FINISHED = auto()
    """Its result is kept."""
    FORGOTTEN = auto()
    """It ran and its result is no longer kept."""
    EARLY = auto()
    """A plan before it is missing."""
    NEEDS_FULL = auto()
    """Its turn, but its delta base is not here: it is expected again, in full."""
    DROPPED = auto()
    """It follows a plan that is expected in full; both will be sent again."""
    OVERRUN = auto()
    """The sender ignores the window altogether."""


class PlanOrder:
    """Made at each attach, dropped at the next. `expected_seq` is the next seq to accept."""

    def __init__(self, *, window: int, cached_results: int) -> None:
        self.expected_seq = 1
        self._window = window
        self._cached_results = max(cached_results, window + 2)
        self._taken_seq: int | None = None
        self._is_awaited = False
        self._awaits_full = False
        self._queue: deque[ArrivedPlan] = deque()
        self._results: OrderedDict[int, ForwardResult] = OrderedDict()

    def arrive(self, plan: ArrivedPlan) -> Arrival:
        """Place the plan; only ACCEPTED changes what will be executed."""
        seq = plan.identity.seq
        if seq > self.expected_seq:
            return Arrival.DROPPED if self._awaits_full else Arrival.EARLY
        if seq in self._results:
            return Arrival.FINISHED
        if seq < self.expected_seq:
            return self._repeated(seq)
        self._awaits_full = isinstance(plan.content, MissingBase)
        return Arrival.NEEDS_FULL if self._awaits_full else self._accept(plan)

    def result(self, seq: int) -> ForwardResult:
        """The kept result of a FINISHED plan."""
        return self._results[seq]

    def take(self) -> ArrivedPlan | None:
        """The next plan to start, which can no longer be removed; it must be finished before another is taken."""
        assert self._taken_seq is None
        if not self._queue:
            return None
        plan = self._queue.popleft()
        self._taken_seq = plan.identity.seq
        self._is_awaited = True
        return plan

    @property
    def waiting(self) -> ArrivedPlan | None:
        """The plan that `take` would give next."""
        return self._queue[0] if self._queue else None

    def finish(self, result: ForwardResult) -> bool:
        """Keep the taken plan's result; True if the open stream has sent that plan."""
        assert result.identity.seq == self._taken_seq
        self._results[result.identity.seq] = result
        while len(self._results) > self._cached_results:
            self._results.popitem(last=False)
        self._taken_seq = None
        return self._is_awaited

    def drop_waiting(self) -> None:
        """Remove plans that have not started and expect the first of them."""
        self.expected_seq -= len(self._queue)
        self._queue.clear()

    def reopen(self) -> None:
        """A new stream: it sends again what has not started, and asks again for the plan that runs."""
        self.drop_waiting()
        self._is_awaited = False
        self._awaits_full = False

    @property
    def has_unanswered(self) -> bool:
        """Whether a plan sent by the open stream has no result yet."""
        return bool(self._queue) or (self._taken_seq is not None and self._is_awaited)

    def _repeated(self, seq: int) -> Arrival:
        if seq == self._taken_seq:
            self._is_awaited = True
            return Arrival.REPEATED
        is_queued = bool(self._queue) and seq >= self._queue[0].identity.seq
        return Arrival.REPEATED if is_queued else Arrival.FORGOTTEN

    def _accept(self, plan: ArrivedPlan) -> Arrival:
        # Plans over the window are refused in their place; a sender that goes on regardless is cut off, or the
        # refusals themselves would grow without bound while one long plan runs.
        if len(self._queue) >= self._window + MAX_WINDOW:
            return Arrival.OVERRUN
        unfinished = len(self._queue) + (self._taken_seq is not None)
        if unfinished >= self._window:
            plan = ArrivedPlan(plan.identity, self._window_rejection())
        self._queue.append(plan)
        self.expected_seq += 1
        return Arrival.ACCEPTED

    def _window_rejection(self) -> PlanRejection:
        return PlanRejection(
            reason=WindowFull.reason,
            field="identity.seq",
            row=None,
            message=f"more than {self._window} plans in flight",
        )
