"""How fast the queue moves: tokens of requests that were placed, over the time in which others were left waiting."""

import math

_MEMORY_S = 20.0
_LEAST_BUSY_S = 2.0
"""Less is too little to predict from."""


class QueueRate:
    """Owned by the scheduling state."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._busy_s = 0.0
        self._waits_since: float | None = None

    def placed(self, tokens: int) -> None:
        """A waiting request of so many known tokens was placed while the queue was busy."""
        if self._waits_since is not None:
            self._tokens += tokens

    def passed(self, now: float, *, is_busy: bool) -> None:
        """A step is over; somebody is left waiting, or not."""
        if self._waits_since is not None:
            spent = max(0.0, now - self._waits_since)
            kept = math.exp(-spent / _MEMORY_S)
            self._tokens *= kept
            self._busy_s = self._busy_s * kept + spent
        self._waits_since = now if is_busy else None

    def wait_s(self, tokens_ahead: int) -> float | None:
        """How long a request behind so many tokens waits; None: not known."""
        if self._busy_s < _LEAST_BUSY_S or self._waits_since is None or not self._tokens:
            return None
        return tokens_ahead * self._busy_s / self._tokens
