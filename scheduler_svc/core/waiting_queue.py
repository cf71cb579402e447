"""Requests that wait for admission: one queue an isolation domain, each in the order of the policy."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler_svc.core.fair_share import FairShares
from scheduler_svc.core.policy import QueueView, Rank, SchedulePolicy
from scheduler_svc.core.request import Request


def _rank(request: Request) -> Rank:
    return request.standing.rank


class WaitingQueue:
    """Ordered. Sums: `tokens` to prefill if nothing is cached, and `output_tokens` that are expected."""

    def __init__(self, policy: SchedulePolicy) -> None:
        self.tokens = 0
        self.output_tokens = 0.0
        self._policy = policy
        self._shares = FairShares()
        self._queues: dict[bytes, list[Request]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        for queue in self._queues.values():
            yield from queue

    def append(self, request: Request) -> None:
        """A new request."""
        self._insert(request)

    def put_back(self, request: Request) -> None:
        """A request that had been running."""
        request.standing.has_run = True
        self._insert(request)

    def remove(self, request: Request) -> None:
        """Take a waiting request out."""
        domain = request.spec.isolation_domain
        queue = self._queues[domain]
        del queue[bisect_left(queue, _rank(request), key=_rank)]
        self.tokens -= request.sampled_len
        self._count -= 1
        self.output_tokens = self.output_tokens - request.standing.expected_output if self._count else 0.0
        if not queue:
            del self._queues[domain]
            self._shares.leave(domain)

    def remove_placed(self, request: Request, *, tokens: float) -> None:
        """Take a request out that was placed, and count what it was given as its domain's share."""
        self._shares.charge(request.spec.isolation_domain, tokens)
        self.remove(request)

    def in_order(self, view: QueueView) -> Iterator[Request]:
        """All requests as they are looked at now. The queue must not change meanwhile."""
        queues = {domain: self._policy.in_order(queue, view) for domain, queue in self._queues.items()}
        return self._shares.merge(queues, view.expected_tokens)

    def _insert(self, request: Request) -> None:
        domain = request.spec.isolation_domain
        queue = self._queues.get(domain)
        if queue is None:
            queue = self._queues[domain] = []
            self._shares.enter(domain)
        request.standing.rank = self._policy.rank(request)
        insort(queue, request, key=_rank)
        self.tokens += request.sampled_len
        self.output_tokens += request.standing.expected_output
        self._count += 1
