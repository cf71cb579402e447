"""Who goes next among the waiting requests of one isolation domain: the scheduling policies behind one protocol.

Between domains `fair_share` decides. Pure; a policy has no state.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from scheduler_svc.core.request import Request
from scheduler_svc.core.settings import CoreSettings, PolicyKind

Rank: TypeAlias = tuple[float, ...]
"""Lower goes first."""

_MOST_MATCHED = 128
"""Waiting requests of a domain up to which `lpm` looks at what is cached; above it is `fcfs`."""
_PATIENCE_S = 10.0
"""Seconds after which a request goes first though little of it is cached."""


class QueueView(NamedTuple):
    """What a policy may look at beside the requests, in one pass."""

    now: float
    """On the core's clock."""
    cached_tokens: Callable[[Request], int]
    """Of a request, on the worker that has most."""
    expected_tokens: Callable[[Request], int]
    """What placing a request would give its domain."""


class SchedulePolicy(Protocol):
    """Made once by `make_policy`."""

    def rank(self, request: Request, /) -> Rank:
        """Place of a request in the queue of its domain; does not change while it waits."""
        ...

    def in_order(self, queue: Sequence[Request], view: QueueView, /) -> Sequence[Request]:
        """The requests of one domain, of which `queue` has them by rank, as they are looked at now."""
        ...


class FirstComeFirstServed:
    """Those that had been running come first, by seniority, then new ones in order of arrival."""

    def rank(self, request: Request, /) -> Rank:
        """By seniority."""
        return (0 if request.standing.has_run else 1, request.standing.seniority)

    def in_order(self, queue: Sequence[Request], _view: QueueView, /) -> Sequence[Request]:
        """As they are."""
        return queue


class LongestPrefixMatch(FirstComeFirstServed):
    """The most cached tokens first, which evicts least; those that had been running or wait for long before."""

    def in_order(self, queue: Sequence[Request], view: QueueView, /) -> Sequence[Request]:
        """By what is cached now, unless too many wait to look."""
        if len(queue) > _MOST_MATCHED:
            return queue

        def key(request: Request) -> Rank:
            standing = request.standing
            comes_first = standing.has_run or view.now - standing.queued_at >= _PATIENCE_S
            return (0, 0) if comes_first else (1, -view.cached_tokens(request))

        return sorted(queue, key=key)


class ByPriority:
    """Higher priority first; one level weighs as much as some seconds of waiting, so nobody waits for ever."""

    def __init__(self, *, aging_s: float) -> None:
        self._aging_s = aging_s

    def rank(self, request: Request, /) -> Rank:
        """When it would have come with priority 0."""
        standing = request.standing
        return (standing.queued_at - self._aging_s * request.spec.priority, standing.seniority)

    def in_order(self, queue: Sequence[Request], _view: QueueView, /) -> Sequence[Request]:
        """As they are."""
        return queue


def make_policy(settings: CoreSettings) -> SchedulePolicy:
    """The policy that the settings name."""
    match settings.schedule_policy:
        case PolicyKind.FCFS:
            return FirstComeFirstServed()
        case PolicyKind.LPM:
            return LongestPrefixMatch()
        case PolicyKind.PRIORITY:
            return ByPriority(aging_s=settings.priority_aging_s)
