"""How many bytes of admitted requests an edge holds: by stream and caller, and together. Counts only.

What waits for readers is bounded by itself (`slow_readers`). Guards: whatever ends a stream, its bytes are given back.
"""

from protos.wire.errors import QueueFull, QuotaExceeded
from protos.wire.limits import MAX_HELD_BYTES, MAX_HELD_BYTES_PER_CALLER
from scheduler_svc.edge.caller_identity import ANONYMOUS, CallerIdentity

_RETRY_AFTER_MS = 1000


class HeldBytes:
    """Made by `CoreLink`."""

    def __init__(
        self, *, max_bytes: int = MAX_HELD_BYTES, max_bytes_per_caller: int = MAX_HELD_BYTES_PER_CALLER
    ) -> None:
        """Hold at most so much."""
        self._max_bytes = max_bytes
        self._max_per_caller = max_bytes_per_caller
        self._streams: dict[int, tuple[str, int]] = {}
        self._callers: dict[str, int] = {}
        self.total = 0

    @property
    def most_of_one_caller(self) -> int:
        """Of the caller with the most. May be asked from any thread, as `total`."""
        return max(list(self._callers.values()), default=0)

    def take(self, stream_id: int, caller: CallerIdentity, num_bytes: int) -> None:
        """Count a stream that begins.

        Raises:
            QuotaExceeded: a caller that is known would hold too much.
            QueueFull: this edge would.
        """
        theirs = self._callers.get(caller.name, 0) + num_bytes
        if caller is not ANONYMOUS and theirs > self._max_per_caller:
            message = f"this caller's running requests may have {self._max_per_caller} bytes together"
            raise QuotaExceeded(message, retry_after_ms=_RETRY_AFTER_MS)
        if self.total + num_bytes > self._max_bytes:
            message = f"the running requests of this edge may have {self._max_bytes} bytes together"
            raise QueueFull(message, retry_after_ms=_RETRY_AFTER_MS)
        self._streams[stream_id] = (caller.name, num_bytes)
        self._callers[caller.name] = theirs
        self.total += num_bytes

    def give_back(self, stream_id: int) -> None:
        """That stream is over, or did not begin."""
        name, num_bytes = self._streams.pop(stream_id)
        self.total -= num_bytes
        self._callers[name] -= num_bytes
        if not self._callers[name]:
            del self._callers[name]
