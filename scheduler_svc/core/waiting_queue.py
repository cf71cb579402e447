"""Requests that wait for admission: one queue an isolation domain, each in the order of the policy.

Those whose reader has fallen behind stand aside: they ask for nothing, and their domain neither saves up nor is in the
way meanwhile.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler_svc.core.fair_share import FairShares
from scheduler_svc.core.policy import QueueView, Rank, SchedulePolicy
from scheduler_svc.core.request import Request


def _rank(request: Request) -> Rank:
    return request.standing.rank


class WaitingQueue:
    """Ordered; `tokens` is the sum of what the requests have to prefill, if nothing is cached.

    `asking_outputs` is the sum of the output tokens that are expected of those that are not paused.

    A request's `is_paused` and its age change only while it is not in the queue.
    """

    def __init__(self, policy: SchedulePolicy) -> None:
        self.tokens = 0
        self.asking_outputs = 0.0
        self._policy = policy
        self._shares = FairShares()
        self._queues: dict[bytes, list[Request]] = {}
        self._paused: dict[int, Request] = {}
        self._paused_tokens = 0
        self._count = 0

    @property
    def asking_tokens(self) -> int:
        """`tokens`, those of paused requests apart."""
        return self.tokens - self._paused_tokens

    @property
    def num_asking(self) -> int:
        """Those that are not paused."""
        return self._count - len(self._paused)

    @property
    def is_asking(self) -> bool:
        """Whether somebody waits who is not paused."""
        return self.num_asking > 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        for queue in self._queues.values():
            yield from queue
        yield from self._paused.values()

    def append(self, request: Request) -> None:
        """A new request, or one that was taken out for a change."""
        self._insert(request)

    def put_back(self, request: Request) -> None:
        """A request that had been running."""
        request.standing.has_run = True
        self._insert(request)

    def remove(self, request: Request) -> None:
        """Take a waiting request out."""
        self.tokens -= request.sampled_len
        self._count -= 1
        if request.standing.is_paused:
            del self._paused[request.handle]
            self._paused_tokens -= request.sampled_len
            return
        self.asking_outputs = self.asking_outputs - request.standing.expected_output if self.is_asking else 0.0
        domain = request.spec.fair_domain
        queue = self._queues[domain]
        del queue[bisect_left(queue, _rank(request), key=_rank)]
        if not queue:
            del self._queues[domain]
            self._shares.leave(domain)

    def remove_placed(self, request: Request, *, tokens: float) -> None:
        """Take a request out that was placed, and count what it was given as its domain's share."""
        self._shares.charge(request.spec.fair_domain, tokens / request.spec.share)
        self.remove(request)

    def in_order(self, view: QueueView) -> Iterator[Request]:
        """All that are not paused, as they are looked at now. The queue must not change meanwhile."""
        queues = {domain: self._policy.in_order(queue, view) for domain, queue in self._queues.items()}
        return self._shares.merge(queues, view.expected_tokens)

    def _insert(self, request: Request) -> None:
        self.tokens += request.sampled_len
        self._count += 1
        if request.standing.is_paused:
            self._paused[request.handle] = request
            self._paused_tokens += request.sampled_len
            return
        self.asking_outputs += request.standing.expected_output
        domain = request.spec.fair_domain
        queue = self._queues.get(domain)
        if queue is None:
            queue = self._queues[domain] = []
            self._shares.enter(domain)
        request.standing.rank = self._policy.rank(request)
        insort(queue, request, key=_rank)
