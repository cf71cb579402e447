"""Prefix cache of one memory: a tree over tokens, one node a whole page, one root an isolation domain.

Owns the pages of its nodes, in every sub-pool. Knows nothing of requests and lengths. Guards: a page that somebody
uses is never evicted; a node is reachable only by exactly its tokens, in its domain.

    refs == 0                 evictable: of the full sub-pools, children first, least recently used first
    window page, unused       evictable by itself; the node stays, and is no place to go on from until it has one again
    not attached              out of every match; freed when the last holding lets go
"""

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from scheduler_svc.memory.cache_node import CacheNode
from scheduler_svc.memory.page_allocator import PageAllocator

_HEAP_SLACK = 64


class RadixCache:
    """Made by `WorkerMemory`, whose allocators it gives pages back to."""

    def __init__(self, allocators: Sequence[PageAllocator], windows: Sequence[int | None], *, page_size: int) -> None:
        self._allocators = allocators
        self._windows = windows
        self._page_size = page_size
        self._roots: dict[bytes, CacheNode] = {}
        self._heap: list[tuple[int, int, CacheNode]] = []
        """(last use, serial, node) of unused leaves; entries that no longer hold are skipped."""
        self._unused = 0
        """Attached nodes nobody holds."""
        self._unused_windows: list[OrderedDict[CacheNode, None]] = [OrderedDict() for _ in allocators]
        """By sub-pool: nodes whose window page nobody uses, least recently used first."""
        self._clock = 0
        self._next_serial = 1
        self.evicted_pages = 0
        """Since the memory was made, all sub-pools together."""

    # --- questions

    def evictable(self, sub_pool: int) -> int:
        """Pages of the sub-pool that could be freed now."""
        return self._unused if self._windows[sub_pool] is None else len(self._unused_windows[sub_pool])

    def follow(
        self, domain: bytes, tokens: "array[int]", path: list[CacheNode], *, most_pages: int
    ) -> CacheNode | None:
        """Bring `path` up to date: the nodes of the longest cached prefix of `tokens`, at most `most_pages`.

        Returns the last of them, or the root; None when the domain has nothing.
        """
        while path and not path[-1].is_attached:
            path.pop()
        tip = path[-1] if path else self._roots.get(domain)
        if tip is None:
            return None
        size = self._page_size
        for begin in range(len(path) * size, most_pages * size, size):
            node = tip.children.get(tokens[begin : begin + size].tobytes())
            if node is None:
                break
            path.append(node)
            tip = node
        return tip

    def nodes(self) -> Iterator[CacheNode]:
        """Every attached node but the roots, parents first."""
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            if node.parent is not None:
                yield node
            pending.extend(node.children.values())

    # --- use

    def hold(self, domain: bytes, path: Sequence[CacheNode]) -> CacheNode:
        """A holding begins with the nodes of `path`; returns the domain's root."""
        root = self._roots.get(domain)
        if root is None:
            root = CacheNode(domain, parent=None, pages=[], serial=self._serial())
            self._roots[domain] = root
        root.refs += 1
        for node in path:
            self.adopt(node)
        return root

    def adopt(self, node: CacheNode) -> None:
        """One more holding has the node on its path."""
        if node.refs == 0:
            self._unused -= 1
        node.refs += 1

    def hold_window(self, node: CacheNode, sub_pool: int) -> None:
        """One more holding uses the node's page of a window sub-pool."""
        if node.window_refs[sub_pool] == 0:
            del self._unused_windows[sub_pool][node]
        node.window_refs[sub_pool] += 1

    def let_go_window(self, node: CacheNode, sub_pool: int) -> None:
        """A holding uses the node's window page no more."""
        node.window_refs[sub_pool] -= 1
        if node.window_refs[sub_pool]:
            return
        if node.is_attached:
            self._unused_windows[sub_pool][node] = None
        else:
            self._free(sub_pool, [node.pages[sub_pool]])
            node.pages[sub_pool] = 0

    def let_go(self, root: CacheNode, path: Sequence[CacheNode]) -> None:
        """A holding ends: it has let go of its window pages before."""
        self._clock += 1
        orphans: list[CacheNode] = []
        for node in reversed(path):
            node.refs -= 1
            if node.refs == 0:
                if node.is_attached:
                    self._unused += 1
                    node.last_used = self._clock
                    self._offer(node)
                else:
                    orphans.append(node)
        self._free_nodes(orphans)
        root.refs -= 1
        self._drop_if_empty(root)

    def insert(self, parent: CacheNode, key: bytes, pages: list[int]) -> CacheNode:
        """A new node with the pages of one holding, which holds it; 0 for window pages that it has given up."""
        node = CacheNode(key, parent=parent, pages=pages, serial=self._serial())
        node.refs = 1
        for sub_pool, window in enumerate(self._windows):
            if window is not None and pages[sub_pool]:
                node.window_refs[sub_pool] = 1
        parent.children[key] = node
        return node

    # --- making room

    def evict(self, sub_pool: int, count: int) -> None:
        """Free at least `count` pages of the sub-pool. The caller has asked `evictable`."""
        if self._windows[sub_pool] is None:
            self._evict_leaves(count)
        else:
            nodes = [self._unused_windows[sub_pool].popitem(last=False)[0] for _ in range(count)]
            self._free(sub_pool, [node.pages[sub_pool] for node in nodes])
            for node in nodes:
                node.pages[sub_pool] = 0
            self.evicted_pages += count

    def discard(self, top: CacheNode) -> int:
        """Take a node and all below it out of every match. Pages freed: those that nobody uses."""
        if not top.is_attached:
            return 0
        parent = top.parent
        if parent is None:
            del self._roots[top.key]
        else:
            del parent.children[top.key]
        unused: list[CacheNode] = []
        freed = 0
        pending = [top]
        while pending:
            node = pending.pop()
            node.is_attached = False
            pending.extend(node.children.values())
            node.children = {}
            if node.parent is not None and node.refs == 0:
                unused.append(node)
                self._unused -= 1
            freed += self._free_unused_windows(node)
        freed += self._free_nodes(unused)
        if parent is not None:
            self._offer(parent)
            self._drop_if_empty(parent)
        self.evicted_pages += freed
        return freed

    def flush(self) -> int:
        """Discard everything; the number of pages freed now."""
        return sum(self.discard(root) for root in list(self._roots.values()))

    # --- inner workings

    def _serial(self) -> int:
        self._next_serial += 1
        return self._next_serial

    def _offer(self, node: CacheNode) -> None:
        """Let an unused leaf be evicted."""
        if node.refs or node.children or node.parent is None or not node.is_attached:
            return
        heapq.heappush(self._heap, (node.last_used, node.serial, node))
        if len(self._heap) > 2 * self._unused + _HEAP_SLACK:
            self._heap = [entry for entry in self._heap if _holds(entry)]
            heapq.heapify(self._heap)

    def _evict_leaves(self, count: int) -> None:
        evicted: list[CacheNode] = []
        while len(evicted) < count:
            entry = heapq.heappop(self._heap)
            node, parent = entry[2], entry[2].parent
            if not _holds(entry) or parent is None:
                continue
            node.is_attached = False
            del parent.children[node.key]
            self._unused -= 1
            self.evicted_pages += self._free_unused_windows(node)
            evicted.append(node)
            self._offer(parent)
            self._drop_if_empty(parent)
        self.evicted_pages += self._free_nodes(evicted)

    def _free_unused_windows(self, node: CacheNode) -> int:
        freed = 0
        for sub_pool, window in enumerate(self._windows):
            if window is not None and node in self._unused_windows[sub_pool]:
                del self._unused_windows[sub_pool][node]
                self._free(sub_pool, [node.pages[sub_pool]])
                node.pages[sub_pool] = 0
                freed += 1
        return freed

    def _free_nodes(self, nodes: Sequence[CacheNode]) -> int:
        """Free the nodes' pages of the full sub-pools."""
        if not nodes:
            return 0
        freed = 0
        for sub_pool, window in enumerate(self._windows):
            if window is None:
                self._free(sub_pool, [node.pages[sub_pool] for node in nodes])
                freed += len(nodes)
        return freed

    def _free(self, sub_pool: int, pages: list[int]) -> None:
        self._allocators[sub_pool].give_back(np.array(pages, dtype=np.int32))

    def _drop_if_empty(self, root: CacheNode) -> None:
        if root.parent is None and root.is_attached and not root.refs and not root.children:
            root.is_attached = False
            del self._roots[root.key]


def _holds(entry: tuple[int, int, CacheNode]) -> bool:
    last_used, _, node = entry
    return node.is_attached and not node.refs and not node.children and node.last_used == last_used
