"""Why requests wait for admission: what the last look at the queue found, and what needs no look."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from scheduler_svc.core.request import Request


class WaitReason(StrEnum):
    """What a waiting request waits for; those a request has several of: the last one named here."""

    BUDGET = "budget"
    """Prefill of requests placed before it fills the plans that are next."""
    ROWS = "rows"
    """Its workers have as many requests as they may have."""
    PAGES = "pages"
    """Its workers lack the pages for it and its reserve."""
    PREFIX = "prefix"
    """Another request is computing the next page of its prompt."""
    WORKER = "worker"
    """No worker is attached that could run it."""
    GRAMMAR = "grammar"
    """Its first mask is not made yet."""
    PAUSED = "paused"
    """Its reader has fallen behind."""


_WEIGHT = {reason: place for place, reason in enumerate(WaitReason)}


def weightiest(reasons: Iterable[WaitReason]) -> WaitReason:
    """Of several reasons the one that is told; none: no worker."""
    return max(reasons, key=_WEIGHT.__getitem__, default=WaitReason.WORKER)


@dataclass(slots=True)
class LastLook:
    """What the last pass over the queue found. Made by `placement`."""

    reasons: dict[int, WaitReason] = field(default_factory=dict)
    """By handle: of those looked at and not placed."""
    others: WaitReason = WaitReason.WORKER
    """Of those it did not come to."""

    def reason(self, request: Request) -> WaitReason:
        """Why a waiting request waits."""
        if request.standing.is_paused:
            return WaitReason.PAUSED
        if request.awaits_mask:
            return WaitReason.GRAMMAR
        return self.reasons.get(request.handle, self.others)

    def count(self, waiting: Iterable[Request]) -> Counter[WaitReason]:
        """How many wait for what. Takes time in proportion to the queue."""
        return Counter(map(self.reason, waiting))
