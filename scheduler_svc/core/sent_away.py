"""Requests that were sent away and told to come again: the next one is told to come behind them. Pure."""


class SentAway:
    """Owned by the scheduling state."""

    def __init__(self) -> None:
        self._until = 0.0

    def hint_s(self, now: float, *, room_in_s: float, takes_s: float, patience_s: float) -> float:
        """When a request is to come again.

        Args:
            now: on the core's clock.
            room_in_s: until there is room for it, if nobody else came.
            takes_s: how much later the next one has room for that.
            patience_s: most that is added for those who were sent away before; not all of them come.
        """
        first = now + room_in_s
        at = min(max(self._until, first), first + patience_s)
        self._until = at + takes_s
        return at - now
