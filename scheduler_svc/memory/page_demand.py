"""How many pages requests need of each sub-pool, from the geometry alone. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protos.wire.enums import SubPoolKind
from protos.wire.worker_info import SubPool
from scheduler_svc.memory.page_holding import PageHolding


@dataclass(frozen=True, slots=True)
class SequenceCapacity:
    """Longest request that fits one worker's empty memory, and what bounds it."""

    tokens: int
    usable_pages: int
    """Of the sub-pool that binds."""
    page_size: int
    window_tokens: int | None
    """Of the sub-pool that binds; None: the full one."""
    window_pages: int
    """With so many usable pages a window sub-pool would bound nothing; 0 of a full one."""


class PageDemand:
    """Of one worker's sub-pools."""

    def __init__(self, windows: Sequence[int | None], *, page_size: int, slack_tokens: int) -> None:
        """Keep the geometry.

        Args:
            windows: tokens of each sub-pool's window; None: a full one.
            page_size: tokens of a page.
            slack_tokens: most tokens one request has in plans in flight; a window sub-pool holds these on top.
        """
        self._windows = tuple(windows)
        self._page_size = page_size
        self._slack_tokens = slack_tokens

    @classmethod
    def of(cls, sub_pools: Sequence[SubPool], *, slack_tokens: int) -> "PageDemand":
        """For a worker's geometry, which passed `check_geometry`."""
        windows = [pool.window_tokens if pool.kind is SubPoolKind.WINDOW else None for pool in sub_pools]
        return cls(windows, page_size=sub_pools[0].page_size, slack_tokens=slack_tokens)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens of each sub-pool's window; None: a full one."""
        return self._windows

    def most(self, tokens: int) -> list[int]:
        """Most pages per sub-pool that a request of `tokens` positions ever holds at once."""
        whole = -(-tokens // self._page_size)
        return [whole if window is None else min(whole, self._window_pages(window)) for window in self._windows]

    def further(self, holdings: Sequence[PageHolding], tokens: Sequence[int]) -> list[int]:
        """Pages per sub-pool that requests need on top of what they hold, to come to `tokens` positions each."""
        whole = -(-np.array(tokens, dtype=np.int64) // self._page_size)
        further = []
        for index, window in enumerate(self._windows):
            most = whole if window is None else np.minimum(whole, self._window_pages(window))
            held = np.array([holding.lists[index].count for holding in holdings], dtype=np.int64)
            further.append(int(np.maximum(most - held, 0).sum()))
        return further

    def capacity(self, usable_pages: Sequence[int]) -> SequenceCapacity:
        """Longest request that fits sub-pools with that many free pages each.

        A window sub-pool that holds its window bounds nothing; one sub-pool is full.
        """
        bounds = [
            SequenceCapacity(
                tokens=usable * self._page_size,
                usable_pages=usable,
                page_size=self._page_size,
                window_tokens=window,
                window_pages=0 if window is None else self._window_pages(window),
            )
            for usable, window in zip(usable_pages, self._windows, strict=True)
            if window is None or usable < self._window_pages(window)
        ]
        return min(bounds, key=lambda bound: bound.tokens)

    def _window_pages(self, window: int) -> int:
        """Most pages of a window sub-pool that one request holds, of which none can be had back.

        With c = floor(kv_len / page_size), pages from c - ceil(window / page_size) on are kept, and plans in flight
        write to position kv_len + slack: ceil(window / page_size) + ceil((slack + page_size - 1) / page_size) pages.
        What is returned is that and at most two more. The slack is needed: a plan's pages are all there before it is
        sent, and those behind its window come back with its result only.
        """
        return -(-(window + self._slack_tokens) // self._page_size) + 2
