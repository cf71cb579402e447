"""One page of the prefix cache. Changed only by `RadixCache`."""

from typing import Any


class CacheNode:
    """The KV of one whole page of tokens, given the pages above it; or a root, which has no page.

    Made and changed by `RadixCache`; read by whoever matches. Lives until it is evicted or discarded and let go.
    """

    __slots__ = (
        "children",
        "is_attached",
        "key",
        "last_used",
        "pages",
        "parent",
        "refs",
        "serial",
        "upcoming",
        "window_refs",
    )

    def __init__(self, key: bytes, *, parent: "CacheNode | None", pages: list[int], serial: int) -> None:
        self.key = key
        """The page's token ids, i32; of a root the isolation domain."""
        self.parent = parent
        self.pages = pages
        """One a sub-pool; 0 where the node has none (given up in a window sub-pool)."""
        self.serial = serial
        self.children: dict[bytes, CacheNode] = {}
        self.refs = 0
        """Holdings whose path it is on; never more than its parent's."""
        self.window_refs = [0] * len(pages)
        """Of these, the ones that use its page of a window sub-pool."""
        self.upcoming: dict[bytes, int] = {}
        """Pages below this one that holdings at this node are computing next: how many holdings by key."""
        self.last_used = 0
        self.is_attached = True
        """False once no match can reach it; its pages are freed when nobody holds it."""

    def __lt__(self, other: Any) -> bool:
        return self.serial < other.serial if isinstance(other, CacheNode) else NotImplemented

    def take_window_page(self, sub_pool: int, page: int) -> None:
        """Get a window page in place of one that was given up; the giver goes on using it."""
        self.pages[sub_pool] = page
        self.window_refs[sub_pool] = 1
