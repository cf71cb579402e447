"""Decides from reports and results whether a worker still makes progress. Pure: times are arguments.

Live = reports arrive, and (no plan is outstanding, or the device counter moved within the budget of the oldest).
"""

from collections import OrderedDict

from protos.wire.errors import EngineError, UnavailableError


class Liveness:
    """One for each term. Made and fed by the session, read by its watch."""

    def __init__(self, *, report_lost_s: float, plan_timeout_s: float, now: float) -> None:
        self._report_lost_s = report_lost_s
        self._plan_timeout_s = plan_timeout_s
        self._reported_at = now
        self._progress_at = now
        self._counter = -1
        self._capture_budget_s = 0.0
        self._budgets_s: OrderedDict[int, float] = OrderedDict()

    def reported(self, *, counter: int, capture_budget_s: float, now: float) -> None:
        """A report arrived."""
        self._reported_at = now
        self._capture_budget_s = capture_budget_s
        if counter != self._counter:
            self._counter = counter
            self._progress_at = now

    def plan_sent(self, seq: int, *, budget_s: float, now: float) -> None:
        """A plan went out; `budget_s` 0 = the default."""
        if not self._budgets_s:
            self._progress_at = now
        self._budgets_s[seq] = budget_s or self._plan_timeout_s

    def plan_answered(self, seq: int, *, now: float) -> None:
        """The plan's result arrived."""
        self._budgets_s.pop(seq, None)
        self._progress_at = now

    def forgive(self, now: float) -> None:
        """This process itself stood still: what the worker sent meanwhile is still to be read."""
        self._reported_at = now
        self._progress_at = now

    def next_check(self) -> float:
        """When the verdict may change if nothing happens until then."""
        return min(self._reported_at + self._report_lost_s, self._progress_at + self._allowance_s())

    def verdict(self, now: float) -> EngineError | None:
        """Why the worker counts as lost; None while it lives."""
        if now - self._reported_at >= self._report_lost_s:
            return UnavailableError("the worker's reports stopped", field="report")
        if now - self._progress_at >= self._allowance_s():
            return UnavailableError("the device stood still for longer than the plan's budget", field="device_counter")
        return None

    def _allowance_s(self) -> float:
        if not self._budgets_s:
            return float("inf")
        return next(iter(self._budgets_s.values())) + self._capture_budget_s
