"""The time of a simulated device: a plan's work ends when its step is over, on average to the microsecond.

A thread that sleeps wakes late; what it overslept is taken from the next step, as a real device would have begun that
step in time. Time in which no plan was there is never taken back, so a gap between plans stays a gap.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Time and the wait for it; fakes in tests."""

    def now_s(self) -> float:
        """Monotonic seconds."""
        ...

    def sleep_s(self, seconds: float) -> None:
        """Wait at least that long."""
        ...


class SystemClock:
    """The machine's own."""

    def now_s(self) -> float:
        """Monotonic seconds."""
        return time.perf_counter()

    def sleep_s(self, seconds: float) -> None:
        """Sleep without holding the interpreter lock."""
        time.sleep(seconds)


class StepPacer:
    """One per device, used by its thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._overslept_s = 0.0
        self._begun_s = 0.0

    def begin(self) -> None:
        """A plan's work begins."""
        self._begun_s = self._clock.now_s()

    def finish(self, step_s: float) -> float:
        """Wait until the step that `begin` began is `step_s` old; its length in seconds."""
        end_s = self._begun_s + max(step_s - self._overslept_s, 0.0)
        remaining_s = end_s - self._clock.now_s()
        if remaining_s > 0:
            self._clock.sleep_s(remaining_s)
        now_s = self._clock.now_s()
        self._overslept_s = min(max(now_s - end_s, 0.0), step_s) if remaining_s > 0 else 0.0
        return now_s - self._begun_s
