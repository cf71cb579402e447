"""How many pages requests need of each sub-pool, from the geometry alone. Pure."""

from collections.abc import Sequence

import numpy as np

from scheduler_svc.memory.page_holding import PageHolding


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

    def capacity_tokens(self, usable_pages: Sequence[int]) -> int:
        """Longest request that fits sub-pools with that many free pages each.

        A window sub-pool that holds its window bounds nothing; one sub-pool is full.
        """
        bounds = [
            usable * self._page_size
            for usable, window in zip(usable_pages, self._windows, strict=True)
            if window is None or usable < self._window_pages(window)
        ]
        return min(bounds)

    def _window_pages(self, window: int) -> int:
        return -(-(window + self._slack_tokens) // self._page_size) + 2
