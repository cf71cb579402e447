"""The books of one memory: free + cached + held = pool, disjoint, in every sub-pool; counts of use are right.

Reads everything, changes nothing. Slow: for tests, idle moments and samples.
"""

from collections import Counter
from collections.abc import Sequence

from protos.wire.errors import InternalFault
from scheduler_svc.memory.cache_node import CacheNode
from scheduler_svc.memory.page_holding import PageHolding
from scheduler_svc.memory.worker_memory import WorkerMemory


def check_memory(memory: WorkerMemory, holdings: Sequence[PageHolding]) -> None:
    """That the memory's pages are where its parts say.

    Raises:
        InternalFault: they are not; says which rule.
    """
    attached = list(memory.cache.nodes())
    refs = Counter(node for holding in holdings for node in holding.path)
    for node in {*attached, *refs}:
        _require(node.refs == refs[node], "a node counts the holdings it is on the path of")
        _require(not node.children or node.is_attached, "what is out of the cache leads to nothing")
    for holding in holdings:
        _check_holding(holding)
    nodes = {*attached, *refs}
    for sub_pool, window in enumerate(memory.windows):
        if window is None:
            unused = sum(1 for node in attached if not node.refs)
        else:
            unused = _check_window_use(holdings, nodes, sub_pool)
        _require(memory.cache.evictable(sub_pool) == unused, "unused cached pages are counted")
        cached = [node.pages[sub_pool] for node in nodes if node.pages[sub_pool]]
        own = [page for holding in holdings for page in _own_pages(holding, sub_pool)]
        _require(
            all(node.pages[sub_pool] for node in nodes) or window is not None, "a node has a page in full sub-pools"
        )
        memory.allocators[sub_pool].check(cached + own)


def _check_holding(holding: PageHolding) -> None:
    parent = holding.root
    for node in holding.path:
        _require(node.parent is parent, "a path goes from the root down")
        parent = node
    for sub_pool, pages in enumerate(holding.lists):
        for index, node in enumerate(holding.path[pages.first :], start=pages.first):
            _require(pages.page(index) == node.pages[sub_pool] != 0, "the first pages are those of the path")
    if holding.announced is not None:
        _require(holding.tip.upcoming.get(holding.announced, 0) > 0, "an announced page is found")


def _check_window_use(holdings: Sequence[PageHolding], nodes: set[CacheNode], sub_pool: int) -> int:
    """Checks who uses which window page; the number of pages that nobody uses."""
    used = Counter(node for holding in holdings for node in holding.path[holding.lists[sub_pool].first :])
    for node in nodes:
        _require(node.window_refs[sub_pool] == used[node], "a node counts the users of its window page")
        _require(node.pages[sub_pool] or not used[node], "a window page that is used is there")
    return sum(1 for node in nodes if node.pages[sub_pool] and not used[node])


def _own_pages(holding: PageHolding, sub_pool: int) -> list[int]:
    pages = holding.lists[sub_pool]
    own: list[int] = pages.between(max(len(holding.path), pages.first), pages.end).tolist()
    return own


def _require(holds: object, rule: str) -> None:
    if not holds:
        raise InternalFault(f"invariant broken: {rule}", field="pages")
