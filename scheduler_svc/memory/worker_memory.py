"""KV memory of one worker group and data-parallel rank: one allocator per sub-pool, and one prefix cache over them.

Every page is free, in the cache, or one request's own (`PageHolding`). The scheduler allocates the pages of every
sub-pool. Full sub-pools keep every page of a request; window sub-pools give up pages wholly below
floor(kv_len / page_size) * page_size - window. Freed and exchanged pages may be used by the next plan at once: order
protects the plans in flight that still read them.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from protos.wire.enums import SubPoolKind
from protos.wire.errors import UnsupportedFeature
from protos.wire.worker_info import SubPool
from scheduler_svc.memory.cache_node import CacheNode
from scheduler_svc.memory.page_allocator import PageAllocator
from scheduler_svc.memory.page_demand import PageDemand
from scheduler_svc.memory.page_holding import MemoryKey, PageHolding
from scheduler_svc.memory.prefix_match import PrefixMatch, first_page, usable_pages
from scheduler_svc.memory.radix_cache import RadixCache


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
    """All allocators of one `MemoryKey`, and its prefix cache. Public attributes are for reading."""

    def __init__(self, key: MemoryKey, sub_pools: Sequence[SubPool], *, slack_tokens: int) -> None:
        """Empty memory.

        Args:
            key: whose it is.
            sub_pools: geometry that passed `check_geometry`.
            slack_tokens: most tokens one request has in plans in flight; a window sub-pool holds these on top.
        """
        self.key = key
        self.page_size = sub_pools[0].page_size
        self.demand = PageDemand.of(sub_pools, slack_tokens=slack_tokens)
        self.windows = self.demand.windows
        self.allocators = tuple(PageAllocator(pool.num_pages) for pool in sub_pools)
        self.cache = RadixCache(self.allocators, self.windows, page_size=self.page_size)
        self._windowed = [(index, window) for index, window in enumerate(self.windows) if window is not None]
        self.capacity = self.demand.capacity([allocator.usable for allocator in self.allocators])
        """What the empty memory holds of one request."""

    # --- questions

    def available(self) -> list[int]:
        """Pages per sub-pool that are free or cached and unused."""
        return [allocator.free + self.cache.evictable(index) for index, allocator in enumerate(self.allocators)]

    def can_grow(self, holding: PageHolding, tokens: int) -> bool:
        """Whether pages for positions below `tokens` can be had now."""
        end = -(-tokens // self.page_size)
        pairs = zip(self.available(), holding.lists, strict=True)
        return all(end - pages.end <= available for available, pages in pairs)

    def match(
        self, domain: bytes, tokens: "array[int]", known: PrefixMatch | None, *, most_tokens: int | None = None
    ) -> PrefixMatch:
        """What is cached of `tokens`; at least the last one is left to compute.

        Args:
            domain: whose cache is asked; others' is never seen.
            tokens: known tokens of a request.
            known: the last answer for the same request, which makes this one cheap.
            most_tokens: of these may be cached, at least as many as for `known`; None: all.
        """
        if known is None or known.cache is not self.cache:
            known = PrefixMatch(self.cache, domain)
        size, path = self.page_size, known.path
        most = (len(tokens) - 1 if most_tokens is None else min(len(tokens) - 1, most_tokens)) // size
        tip = self.cache.follow(domain, tokens, path, most_pages=most)
        known.pages = usable_pages(path, self.windows, page_size=size) if self._windowed else len(path)
        begin = len(path) * size
        next_page = tokens[begin : begin + size].tobytes()
        known.is_upcoming = tip is not None and len(path) < most and next_page in tip.upcoming
        return known

    def shared(self, match: PrefixMatch) -> list[int]:
        """Pages per sub-pool of a match that others use already, so that using them takes nothing."""
        nodes = match.nodes()
        in_use = next((index for index, node in enumerate(nodes) if not node.refs), len(nodes))
        counts = [in_use] * len(self.windows)
        for sub_pool, window in self._windowed:
            first = first_page(len(nodes), window, page_size=self.page_size)
            counts[sub_pool] = sum(1 for node in nodes[first:] if node.window_refs[sub_pool])
        return counts

    # --- changes

    def reserve(self, tokens: "array[int]", match: PrefixMatch, *, trusts_cache: bool = True) -> PageHolding:
        """A new request's holding: the pages of the match, and those of all of `tokens` in the full sub-pools.

        Args:
            tokens: known tokens of the request.
            match: as of now.
            trusts_cache: False: use nothing that others computed.
        """
        path = list(match.nodes()) if trusts_cache else []
        root = self.cache.hold(match.domain, path)
        holding = PageHolding(self.key, num_sub_pools=len(self.allocators), root=root, path=path)
        holding.trusts_cache = trusts_cache
        end = -(-len(tokens) // self.page_size)
        for sub_pool, window in self._windowed:
            first = first_page(len(path), window, page_size=self.page_size)
            for node in path[first:]:
                self.cache.hold_window(node, sub_pool)
            holding.lists[sub_pool].start_at(first)
            holding.lists[sub_pool].extend(_pages(path[first:], sub_pool))
        for sub_pool, pages in enumerate(holding.lists):
            if self.windows[sub_pool] is None:
                pages.extend(_pages(path, sub_pool))
                pages.extend(self._take(sub_pool, end - len(path)))
        self._update(holding)
        self.announce(holding, tokens)
        return holding

    def grow(self, holding: PageHolding, tokens: int) -> None:
        """Take pages for positions below `tokens` in every sub-pool. The caller has asked `can_grow`."""
        end = -(-tokens // self.page_size)
        for sub_pool, pages in enumerate(holding.lists):
            if end > pages.end:
                pages.extend(self._take(sub_pool, end - pages.end))
        self._update(holding)

    def is_due(self, begin: int, end: int) -> bool:
        """Whether `commit` has something to do once positions [begin, end) are written."""
        return begin // self.page_size != end // self.page_size or bool(self._windowed)

    def commit(self, holding: PageHolding, tokens: "array[int]", kv_len: int) -> None:
        """Let the whole pages below `kv_len` enter the cache, then free the window pages no later window reaches.

        A page that is in the cache already is exchanged for that one, and freed.
        """
        if holding.is_sharing and kv_len >= (len(holding.path) + 1) * self.page_size:
            self.announce(holding, None)
            self._share(holding, tokens, kv_len // self.page_size)
            self.announce(holding, tokens)
        if self._windowed:
            self._give_up_passed(holding, kv_len)

    def announce(self, holding: PageHolding, tokens: "array[int] | None") -> None:
        """Tell others which page the holding computes next, if it is known; None: none, for now."""
        tip = holding.tip
        if holding.announced is not None:
            left = tip.upcoming.pop(holding.announced) - 1
            if left:
                tip.upcoming[holding.announced] = left
            holding.announced = None
        if tokens is None or not holding.is_sharing:
            return
        begin = len(holding.path) * self.page_size
        if len(tokens) >= begin + self.page_size:
            holding.announced = tokens[begin : begin + self.page_size].tobytes()
            tip.upcoming[holding.announced] = tip.upcoming.get(holding.announced, 0) + 1

    def release(self, holding: PageHolding) -> None:
        """Give everything back: cached pages stay cached, the others are free."""
        self.announce(holding, None)
        shared = len(holding.path)
        for sub_pool, _ in self._windowed:
            for node in holding.path[holding.lists[sub_pool].first :]:
                self.cache.let_go_window(node, sub_pool)
        for allocator, pages in zip(self.allocators, holding.lists, strict=True):
            allocator.give_back(pages.between(max(shared, pages.first), pages.end))
            pages.drop_before(pages.end)
        self.cache.let_go(holding.root, holding.path)
        holding.path = []

    def distrust(self, holding: PageHolding) -> None:
        """Take every page that the holding has used or brought in out of the cache, with all that builds on it."""
        if holding.path:
            self.cache.discard(holding.path[0])

    # --- inner workings

    def _share(self, holding: PageHolding, tokens: "array[int]", end: int) -> None:
        size, path, parent = self.page_size, holding.path, holding.tip
        if not parent.is_attached:
            holding.is_sharing = False
            return
        for index in range(len(path), end):
            key = tokens[index * size : (index + 1) * size].tobytes()
            node = parent.children.get(key)
            if node is None:
                node = self.cache.insert(parent, key, [pages.page(index) for pages in holding.lists])
            elif holding.trusts_cache:
                self._exchange(holding, index, node)
            else:
                holding.is_sharing = False
                return
            path.append(node)
            parent = node

    def _exchange(self, holding: PageHolding, index: int, node: CacheNode) -> None:
        """Hold the node's pages in place of the own ones of the same tokens."""
        self.cache.adopt(node)
        for sub_pool, pages in enumerate(holding.lists):
            own = pages.page(index)
            if not own:
                continue
            if self.windows[sub_pool] is not None:
                if not node.pages[sub_pool]:
                    node.take_window_page(sub_pool, own)
                    continue
                self.cache.hold_window(node, sub_pool)
            pages.replace(index, node.pages[sub_pool])
            self.allocators[sub_pool].give_back(np.array([own], dtype=np.int32))

    def _give_up_passed(self, holding: PageHolding, kv_len: int) -> None:
        for sub_pool, window in self._windowed:
            pages = holding.lists[sub_pool]
            index = min(first_page(kv_len // self.page_size, window, page_size=self.page_size), pages.end)
            if index <= pages.first:
                continue
            shared = len(holding.path)
            for node in holding.path[pages.first : index]:
                self.cache.let_go_window(node, sub_pool)
            own = pages.between(min(max(shared, pages.first), index), index).copy()
            pages.drop_before(index)
            self.allocators[sub_pool].give_back(own)

    def _take(self, sub_pool: int, count: int) -> np.ndarray:
        allocator = self.allocators[sub_pool]
        if count > allocator.free:
            self.cache.evict(sub_pool, count - allocator.free)
        return allocator.take(count)

    def _update(self, holding: PageHolding) -> None:
        holding.allocated_len = min(pages.end for pages in holding.lists) * self.page_size


def _pages(nodes: Sequence[CacheNode], sub_pool: int) -> np.ndarray:
    return np.array([node.pages[sub_pool] for node in nodes], dtype=np.int32)
