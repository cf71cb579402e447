"""Fair shares between isolation domains: the one that was given least goes next.

Counts tokens given to each domain that has requests waiting. A domain that begins to wait starts at the count of the
one served last: it does not make up for a time in which it asked for nothing. Knows no policy.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence

from scheduler_svc.core.request import Request


class FairShares:
    """Owned by the waiting queue."""

    def __init__(self) -> None:
        self._given: dict[bytes, float] = {}
        self._served = 0.0
        """Count of the domain served last, before it was served."""

    def enter(self, domain: bytes) -> None:
        """The domain has a request waiting, and had none."""
        self._given[domain] = self._served

    def leave(self, domain: bytes) -> None:
        """It has none any more."""
        del self._given[domain]

    def charge(self, domain: bytes, tokens: float) -> None:
        """A request of a waiting domain was placed."""
        self._served = max(self._served, self._given[domain])
        self._given[domain] += tokens

    def merge(
        self, queues: Mapping[bytes, Sequence[Request]], expected_tokens: Callable[[Request], int]
    ) -> Iterator[Request]:
        """All requests of the queues, each in its order, as fair shares place them."""
        if len(queues) == 1:
            yield from next(iter(queues.values()))
            return
        heap = [(self._given[domain], place, iter(queue)) for place, (domain, queue) in enumerate(queues.items())]
        heapq.heapify(heap)
        while heap:
            given, place, queue = heap[0]
            request = next(queue, None)
            if request is None:
                heapq.heappop(heap)
                continue
            yield request
            heapq.heapreplace(heap, (given + expected_tokens(request), place, queue))
