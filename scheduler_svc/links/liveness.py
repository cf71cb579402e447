"""Decides from reports and results whether a worker still makes progress. Pure: times are arguments.

Live = reports arrive, and (no plan is outstanding, or the device counter moved within the budget of the oldest).
Doubtful = late, and not yet too late. While the stream is broken a plan counts only if the device is known to be at it:
others wait for a stream, as results of finished ones do, and how long that may take is not decided here.
"""

from collections import OrderedDict
from dataclasses import dataclass

from protos.wire.errors import EngineError, UnavailableError

_RESULT_FOLLOWS_S = 0.5
"""What a result that waited for a stream may take on it."""
_DOUBTFUL_SHARE = 0.5
"""Of a plan's budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessLimits:
    """How late is late."""

    report_late_s: float
    """Without a report, then doubtful."""
    report_lost_s: float
    """Without a report, then lost."""
    plan_timeout_s: float
    """For the device to stand still on a plan without a budget."""


class Liveness:
    """One for each term. Made and fed by the session, read by its watch."""

    def __init__(self, limits: LivenessLimits, *, now: float) -> None:
        self._limits = limits
        self._reported_at = now
        self._progress_at = now
        self._counter = -1
        self._capture_budget_s = 0.0
        self._budgets_s: OrderedDict[int, float] = OrderedDict()
        self._device_seq = 0
        self._is_broken = False

    def reported(self, *, counter: int, device_seq: int, capture_budget_s: float, now: float) -> None:
        """A report arrived. `device_seq` is the plan that the device computes; 0: none."""
        self._reported_at = now
        self._device_seq = device_seq
        self._capture_budget_s = capture_budget_s
        if counter != self._counter:
            self._counter = counter
            self._progress_at = now

    def plan_sent(self, seq: int, *, budget_s: float, now: float) -> None:
        """A plan went out; `budget_s` 0 = the default."""
        if not self._budgets_s:
            self._progress_at = now
        self._budgets_s[seq] = budget_s or self._limits.plan_timeout_s

    def plan_answered(self, seq: int, *, now: float) -> None:
        """The plan's result arrived."""
        self._budgets_s.pop(seq, None)
        self._progress_at = now

    def stream_broke(self) -> None:
        """No plan reaches the worker and no result this process, until a stream is open again."""
        self._is_broken = True

    def stream_reopened(self, now: float, *, is_new_to_worker: bool) -> None:
        """Plans were sent again, and results. A device that hangs on the oldest plan gains no time from that.

        A plan that the worker has was started, and may be finished: then its result follows at once.
        """
        self._is_broken = False
        if is_new_to_worker:
            self._progress_at = now
        elif not self._is_at_oldest():
            self._progress_at = max(self._progress_at, now + _RESULT_FOLLOWS_S - self._allowance_s())

    def forgive(self, now: float) -> None:
        """This process itself stood still: what the worker sent meanwhile is still to be read."""
        self._reported_at = now
        self._progress_at = now

    def next_check(self, now: float) -> float:
        """When verdict or doubt may change if nothing happens until then."""
        limits, allowance_s = self._limits, self._allowance_s()
        doubts = (self._reported_at + limits.report_late_s, self._progress_at + _DOUBTFUL_SHARE * allowance_s)
        ends = (self._reported_at + limits.report_lost_s, self._progress_at + allowance_s)
        return min(*ends, *(at for at in doubts if at > now))

    def is_doubtful(self, now: float) -> bool:
        """Whether the worker is late."""
        is_silent = now - self._reported_at >= self._limits.report_late_s
        return is_silent or now - self._progress_at >= _DOUBTFUL_SHARE * self._allowance_s()

    def verdict(self, now: float) -> EngineError | None:
        """Why the worker counts as lost; None while it lives."""
        if now - self._reported_at >= self._limits.report_lost_s:
            return UnavailableError("the worker's reports stopped", field="report")
        if now - self._progress_at >= self._allowance_s():
            return UnavailableError("the device stood still for longer than the plan's budget", field="device_counter")
        return None

    def _allowance_s(self) -> float:
        if not self._budgets_s or (self._is_broken and not self._is_at_oldest()):
            return float("inf")
        return next(iter(self._budgets_s.values())) + self._capture_budget_s

    def _is_at_oldest(self) -> bool:
        """Whether the device is known to compute the oldest plan that is out."""
        return self._device_seq == next(iter(self._budgets_s), None)
