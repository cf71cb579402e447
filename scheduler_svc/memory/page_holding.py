"""One request's pages in one memory.

pages with index [0, len(path))        of the prefix cache: read by others too, written by nobody
pages with index [len(path), end)      its own
"""

from dataclasses import dataclass

from scheduler_svc.memory.cache_node import CacheNode
from scheduler_svc.memory.page_list import PageList


@dataclass(frozen=True, slots=True)
class MemoryKey:
    """Whose memory it is."""

    worker: str
    dp_rank: int


class PageHolding:
    """Pages, one list per sub-pool. Changed only by the `WorkerMemory` that made it."""

    __slots__ = ("allocated_len", "announced", "is_sharing", "key", "lists", "path", "root", "trusts_cache")

    def __init__(self, key: MemoryKey, *, num_sub_pools: int, root: CacheNode, path: list[CacheNode]) -> None:
        self.key = key
        self.lists = tuple(PageList() for _ in range(num_sub_pools))
        self.root = root
        """Of the isolation domain."""
        self.path = path
        """The nodes whose pages are its first ones."""
        self.allocated_len = 0
        """Positions [0, allocated_len) have a page, or had one, in every sub-pool."""
        self.is_sharing = True
        """Whether further whole pages of it enter the cache."""
        self.trusts_cache = True
        """Whether it may take another's page for its own of the same tokens."""
        self.announced: bytes | None = None
        """The page it computes next, as others find it in `tip.upcoming`."""

    @property
    def tip(self) -> CacheNode:
        """The last node of its path, or the root."""
        return self.path[-1] if self.path else self.root
