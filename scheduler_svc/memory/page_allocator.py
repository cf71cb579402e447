"""Free list of the pages of one sub-pool.

Owns which pages are free; who holds the others is the caller's business. Knows nothing of requests and plans.

    page 0                the sink, never handed out
    [1, num_pages)        usable: free or held, never both
"""

from collections.abc import Sequence

import numpy as np

from protos.wire.errors import InternalFault


class PageAllocator:
    """Hands out pages, last given back first. Deterministic."""

    def __init__(self, num_pages: int) -> None:
        self.usable = num_pages - 1
        self.free = self.usable
        self._stack = np.arange(self.usable, 0, -1, dtype=np.int32)
        self._held = np.zeros(num_pages, dtype=np.bool_)

    @property
    def held(self) -> int:
        """Pages handed out and not given back."""
        return self.usable - self.free

    def take(self, count: int) -> np.ndarray:
        """The next `count` pages, i32 [count]. The caller has checked `free`."""
        assert 0 <= count <= self.free, "more pages taken than are free"
        self.free -= count
        pages = self._stack[self.free : self.free + count][::-1].copy()
        self._held[pages] = True
        return pages

    def give_back(self, pages: np.ndarray) -> None:
        """Make held pages free again; the first of `pages` is the next to be taken."""
        assert bool(self._held[pages].all()), "a page given back that is not held"
        self._held[pages] = False
        count = len(pages)
        self._stack[self.free : self.free + count] = pages[::-1]
        self.free += count

    def check(self, held: Sequence[int]) -> None:
        """That `held` are disjoint and together with the free ones are the pool.

        Raises:
            InternalFault: they are not.
        """
        holders = np.array(held, dtype=np.int32)
        everything = np.sort(np.concatenate([self._stack[: self.free], holders]))
        if not np.array_equal(everything, np.arange(1, self.usable + 1)) or not bool(self._held[holders].all()):
            raise InternalFault("free, cached and held pages are not a partition of the pool", field="pages")
