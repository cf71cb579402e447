"""Fair shares between isolation domains: the one that was given least goes next (start-time fair queueing).

Counts tokens given to each domain that has requests waiting, divided by the weight of its share. A domain that begins
to wait starts at the count of the one served last, since it does not make up for a time in which it asked for nothing;
or at its own, if that is higher, since it does not get rid of what it was given by having nothing to ask for an
instant. Knows no policy.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence

from scheduler_svc.core.request import Request

_MOST_REMEMBERED = 4096
"""Domains without a waiting request whose count is kept."""


class FairShares:
    """Owned by the waiting queue."""

    def __init__(self) -> None:
        self._given: dict[bytes, float] = {}
        self._left: dict[bytes, float] = {}
        """Of domains that have none waiting: counts above `_served`."""
        self._served = 0.0
        """Count of the domain served last, before it was served."""

    def enter(self, domain: bytes) -> None:
        """The domain has a request waiting, and had none."""
        self._given[domain] = max(self._served, self._left.pop(domain, 0.0))

    def leave(self, domain: bytes) -> None:
        """It has none any more."""
        self._left[domain] = self._given.pop(domain)
        if len(self._left) > _MOST_REMEMBERED:
            above = sorted((given, name) for name, given in self._left.items() if given > self._served)
            self._left = {name: given for given, name in above[-_MOST_REMEMBERED // 2 :]}

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
            heapq.heapreplace(heap, (given + expected_tokens(request) / request.spec.share, place, queue))
