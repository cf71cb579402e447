"""KV memory of one worker group and data-parallel rank: one allocator per sub-pool.

Owns the pages; a `PageHolding` is one request's share of them. The scheduler allocates the pages of every sub-pool.
Full sub-pools keep every page of a request; window sub-pools give up pages wholly below
floor(kv_len / page_size) * page_size - window.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from protos.wire.enums import SubPoolKind
from protos.wire.errors import UnsupportedFeature
from protos.wire.worker_info import SubPool
from scheduler_svc.memory.page_allocator import PageAllocator
from scheduler_svc.memory.page_list import PageList

_UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class MemoryKey:
    """Whose memory it is."""

    worker: str
    dp_rank: int


class PageHolding:
    """One request's pages, one list per sub-pool. Changed only by the `WorkerMemory` that made it."""

    __slots__ = ("allocated_len", "key", "lists")

    def __init__(self, key: MemoryKey, num_sub_pools: int) -> None:
        self.key = key
        self.lists = tuple(PageList() for _ in range(num_sub_pools))
        self.allocated_len = 0
        """Positions [0, allocated_len) have a page, or had one, in every sub-pool."""


def check_geometry(sub_pools: Sequence[SubPool]) -> None:
    """That this scheduler can allocate for a worker of these sub-pools.

    Raises:
        UnsupportedFeature: a recurrent sub-pool, several page sizes, no full sub-pool, or none at all.
    """
    kinds = [pool.kind for pool in sub_pools]
    if SubPoolKind.FULL not in kinds or SubPoolKind.RECURRENT in kinds:
        raise UnsupportedFeature("sub-pools must be full or window, at least one of them full", field="sub_pools")
    if len({pool.page_size for pool in sub_pools}) != 1:
        raise UnsupportedFeature("all sub-pools must have one page size", field="sub_pools.page_size")


class WorkerMemory:
    """All allocators of one `MemoryKey`."""

    def __init__(self, key: MemoryKey, sub_pools: Sequence[SubPool], *, slack_tokens: int) -> None:
        """Empty memory.

        Args:
            key: whose it is.
            sub_pools: geometry that passed `check_geometry`.
            slack_tokens: most tokens one request has in plans in flight; a window sub-pool holds these on top.
        """
        self.key = key
        self.page_size = sub_pools[0].page_size
        self.windows = tuple(p.window_tokens if p.kind == SubPoolKind.WINDOW else None for p in sub_pools)
        self._allocators = tuple(PageAllocator(pool.num_pages) for pool in sub_pools)
        self._slack_tokens = slack_tokens
        self.capacity_tokens = min(self._capacity(index) for index in range(len(sub_pools)))
        """Longest request that fits the empty memory."""

    # --- questions

    def free(self) -> list[int]:
        """Free pages per sub-pool."""
        return [allocator.free for allocator in self._allocators]

    def usable(self) -> list[int]:
        """Pages per sub-pool, the sink apart."""
        return [allocator.usable for allocator in self._allocators]

    def demand(self, tokens: int) -> list[int]:
        """Most pages per sub-pool that a request of `tokens` positions ever holds at once."""
        whole = -(-tokens // self.page_size)
        return [whole if window is None else min(whole, self._window_pages(window)) for window in self.windows]

    def further_demand(self, holdings: Sequence[PageHolding], tokens: Sequence[int]) -> list[int]:
        """Pages per sub-pool that requests need on top of what they hold, to come to `tokens` positions each."""
        whole = -(-np.array(tokens, dtype=np.int64) // self.page_size)
        further = []
        for index, window in enumerate(self.windows):
            most = whole if window is None else np.minimum(whole, self._window_pages(window))
            held = np.array([holding.lists[index].count for holding in holdings], dtype=np.int64)
            further.append(int(np.maximum(most - held, 0).sum()))
        return further

    def can_grow(self, holding: PageHolding, tokens: int) -> bool:
        """Whether pages for positions below `tokens` can be had now."""
        end = -(-tokens // self.page_size)
        pairs = zip(self._allocators, holding.lists, strict=True)
        return all(end - pages.end <= allocator.free for allocator, pages in pairs)

    # --- changes

    def reserve(self, tokens: int) -> PageHolding:
        """A new request's holding, with the pages of positions [0, tokens) of the full sub-pools."""
        holding = PageHolding(self.key, len(self._allocators))
        end = -(-tokens // self.page_size)
        for allocator, pages, window in zip(self._allocators, holding.lists, self.windows, strict=True):
            if window is None:
                pages.extend(allocator.take(end))
        self._update(holding)
        return holding

    def grow(self, holding: PageHolding, tokens: int) -> None:
        """Take pages for positions below `tokens` in every sub-pool. The caller has asked `can_grow`."""
        end = -(-tokens // self.page_size)
        for allocator, pages in zip(self._allocators, holding.lists, strict=True):
            if end > pages.end:
                pages.extend(allocator.take(end - pages.end))
        self._update(holding)

    def give_up_passed(self, holding: PageHolding, kv_len: int) -> None:
        """Free the pages that no later position's window reaches."""
        border = kv_len // self.page_size * self.page_size
        for allocator, pages, window in zip(self._allocators, holding.lists, self.windows, strict=True):
            if window is not None:
                index = max(0, border - window) // self.page_size
                if index > pages.first:
                    allocator.give_back(pages.drop_before(index))

    def release(self, holding: PageHolding) -> None:
        """Free everything. They may be used by the next plan at once: order protects them."""
        for allocator, pages in zip(self._allocators, holding.lists, strict=True):
            allocator.give_back(pages.drop_before(pages.end))

    def check(self, holdings: Iterable[PageHolding]) -> None:
        """That free and held pages are a partition of each sub-pool.

        Raises:
            InternalFault: they are not.
        """
        holders = list(holdings)
        for index, allocator in enumerate(self._allocators):
            allocator.check(holding.lists[index].held() for holding in holders)

    def _update(self, holding: PageHolding) -> None:
        holding.allocated_len = min(pages.end for pages in holding.lists) * self.page_size

    def _capacity(self, index: int) -> int:
        usable, window = self._allocators[index].usable, self.windows[index]
        if window is not None and usable >= self._window_pages(window):
            return _UNBOUNDED
        return usable * self.page_size

    def _window_pages(self, window: int) -> int:
        return -(-(window + self._slack_tokens) // self.page_size) + 2
