"""How often a stream may be written to.

A write costs the event loop about the same whatever it carries, so under load streams are written to less often and
each chunk carries more; with few streams every token leaves at once.
"""

from collections.abc import Callable

_LONGEST_PAUSE_S = 0.05


class WritePacing:
    """Shared by all streams of an edge. Made by its composition root."""

    def __init__(self, num_streams: Callable[[], int], *, writes_per_s: float = 6000.0) -> None:
        """Bound the writes.

        Args:
            num_streams: how many streams there are now.
            writes_per_s: most writes of all streams together, as long as the pause stays below its own limit.
        """
        self._num_streams = num_streams
        self._seconds_per_write = 1.0 / writes_per_s

    def pause_s(self) -> float:
        """Seconds between two writes of one stream, now."""
        return min(_LONGEST_PAUSE_S, self._num_streams() * self._seconds_per_write)
