"""How much of a request's known tokens one memory has cached, and whether somebody is computing more of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_svc.memory.cache_node import CacheNode
from scheduler_svc.memory.radix_cache import RadixCache


@dataclass(slots=True, eq=False)
class PrefixMatch:
    """Made and brought up to date by `WorkerMemory.match`; good until the memory changes."""

    cache: RadixCache
    domain: bytes
    path: list[CacheNode] = field(default_factory=list)
    """Every cached page, in order; of these the first `pages` can be used."""
    pages: int = 0
    is_upcoming: bool = False
    """A request on this memory is computing the page behind `path`."""

    def nodes(self) -> Sequence[CacheNode]:
        """Of the pages that can be used."""
        return self.path[: self.pages]


def usable_pages(path: Sequence[CacheNode], windows: Sequence[int | None], *, page_size: int) -> int:
    """Most pages of `path` one can go on from: the window pages of the window before the next token are there."""
    most = len(path)
    while most:
        missing = [
            index
            for sub_pool, window in enumerate(windows)
            if window is not None
            for index in range(first_page(most, window, page_size=page_size), most)
            if not path[index].pages[sub_pool]
        ]
        if not missing:
            break
        most = max(missing)
    return most


def first_page(pages: int, window: int, *, page_size: int) -> int:
    """The first window page that a sequence of so many whole pages still needs."""
    return max(0, pages * page_size - window) // page_size
