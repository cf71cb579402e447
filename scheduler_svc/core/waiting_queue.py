"""Requests that wait for admission: those that come back first, by seniority, then new ones in order of arrival."""

from bisect import insort
from collections.abc import Iterator

from scheduler_svc.core.request import Request


class WaitingQueue:
    """Ordered; removal does not depend on the length. `tokens` is the sum of what the requests have to prefill."""

    def __init__(self) -> None:
        self.tokens = 0
        self._returned: list[Request] = []
        self._new: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._returned) + len(self._new)

    def __iter__(self) -> Iterator[Request]:
        yield from self._returned
        yield from self._new.values()

    def append(self, request: Request) -> None:
        """A new request, behind all others."""
        self._new[request.handle] = request
        self.tokens += request.sampled_len

    def put_back(self, request: Request) -> None:
        """A request that had been running, before all new ones."""
        insort(self._returned, request, key=lambda waiting: waiting.handle)
        self.tokens += request.sampled_len

    def remove(self, request: Request) -> None:
        """Take a waiting request out."""
        if self._new.pop(request.handle, None) is None:
            self._returned.remove(request)
        self.tokens -= request.sampled_len
