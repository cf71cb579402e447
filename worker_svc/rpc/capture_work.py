"""An executor's captures as spare work of the device thread, with the time that each piece announces to the reports."""

import math
from collections.abc import Callable

from worker_svc.executor import Captures
from worker_svc.rpc.device_work import DeviceWork

BUDGET_FACTOR = 10
MIN_BUDGET_MS = 1_000
UNKNOWN_BUDGET_MS = 60_000


class CaptureWork:
    """A `SpareWork`. Made when the executor is loaded; all but the construction happens on the device thread."""

    def __init__(self, captures: Captures, work: DeviceWork) -> None:
        self._captures = captures
        self._work = work
        self._next_ms = math.inf

    @property
    def max_wait_s(self) -> float:
        """See `SpareWork.max_wait_s`."""
        return self._captures.wait_s

    @property
    def is_done(self) -> bool:
        """See `SpareWork.is_done`."""
        return self._captures.progress.is_done

    def next_piece_ms(self, *, is_idle: bool) -> float | None:
        """See `SpareWork.next_piece_ms`."""
        found = self._captures.next_ms(is_idle=is_idle)
        self._next_ms = math.inf if found is None else found
        return found

    def run(self, give_way: Callable[[float], None], *, is_idle: bool) -> None:
        """See `SpareWork.run`: one capture."""

        def between(piece_ms: float) -> None:
            self._work.capture_piece_ended()
            give_way(piece_ms)
            self._work.capture_piece_begins(budget_ms=budget_ms(piece_ms))

        self._work.capture_piece_begins(budget_ms=budget_ms(self._next_ms))
        try:
            self._captures.capture_next(between, is_idle=is_idle)
        finally:
            self._work.capture_piece_ended()


def budget_ms(piece_ms: float) -> int:
    """How long a piece of this predicted length may take before somebody worries."""
    if math.isinf(piece_ms):
        return UNKNOWN_BUDGET_MS
    return max(MIN_BUDGET_MS, int(BUDGET_FACTOR * piece_ms))
