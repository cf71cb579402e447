"""The pages one request holds in one sub-pool, in order of positions.

pages with index [0, first)        given up (window sub-pools only)
pages with index [first, end)      held; page index i holds positions [i * page_size, (i + 1) * page_size)
"""

import numpy as np

_FIRST_CAPACITY = 16


class PageList:
    """A growing i32 array; slices of it are what page tables are joined from."""

    __slots__ = ("_buffer", "end", "first")

    def __init__(self) -> None:
        self.first = 0
        self.end = 0
        self._buffer = np.zeros(_FIRST_CAPACITY, dtype=np.int32)

    @property
    def count(self) -> int:
        """Pages held."""
        return self.end - self.first

    def extend(self, pages: np.ndarray) -> None:
        """Append pages for the next positions."""
        new_end = self.end + len(pages)
        if new_end > len(self._buffer):
            grown = np.zeros(max(new_end, 2 * len(self._buffer)), dtype=np.int32)
            grown[: self.end] = self._buffer[: self.end]
            self._buffer = grown
        self._buffer[self.end : new_end] = pages
        self.end = new_end

    def start_at(self, first: int) -> None:
        """Begin an empty list with the page of that index; those before it are not held."""
        assert self.end == 0
        if first > len(self._buffer):
            self._buffer = np.zeros(2 * first, dtype=np.int32)
        self.first = self.end = first

    def page(self, index: int) -> int:
        """The page with that index; 0 if it is not held."""
        return int(self._buffer[index]) if self.first <= index < self.end else 0

    def replace(self, index: int, page: int) -> None:
        """Hold another page for the same positions."""
        assert self.first <= index < self.end
        self._buffer[index] = page

    def between(self, begin: int, end: int) -> np.ndarray:
        """Pages with index [begin, end), a view; all of them are held."""
        assert self.first <= begin <= end <= self.end
        return self._buffer[begin:end]

    def until(self, end: int) -> np.ndarray:
        """The held pages with index below `end`, a view."""
        return self._buffer[self.first : end]

    def held(self) -> np.ndarray:
        """All held pages, a view."""
        return self._buffer[self.first : self.end]

    def drop_before(self, index: int) -> np.ndarray:
        """Give up the pages below `index` and return them."""
        dropped = self._buffer[self.first : index].copy()
        self.first = index
        return dropped
