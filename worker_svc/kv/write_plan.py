"""WritePlan: where one step writes, per sub-pool, in device slots.

Made once per plan and bound by each of its forwards, and the only source of write slots. Guards: each sub-pool is
translated at most once a step, and not before somebody asks; what is not named writes to the sink.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from protos.wire.plan import WriteWindow

Array = np.ndarray

SINK_SLOT = 0
TO_SINK = -1
"""In a flat index."""


class SlotTranslator(Protocol):
    """Turns places in a sub-pool's pages into device slots; keeps nothing between plans."""

    def slots(self, sub_pool: int, pages: Array, offsets: Array) -> Array:
        """[n] int64 slots of the places (pages[i], offsets[i])."""
        ...


class WritePlan:
    """Lives for one step. T = tokens of the plan."""

    def __init__(self, translator: SlotTranslator, places: Callable[[int], tuple[Array, Array]]) -> None:
        """Nothing is computed yet.

        Args:
            translator: of the pools that are written.
            places: ([T] page, [T] offset in it) of each token of the plan in a sub-pool.
        """
        self._translator = translator
        self._places = places
        self._slots: dict[int, Array] = {}

    def slots(self, sub_pool: int) -> Array:
        """[T] int64, read-only: where each token of the plan is written. The same object at every call."""
        known = self._slots.get(sub_pool)
        if known is None:
            known = self._translator.slots(sub_pool, *self._places(sub_pool))
            known.setflags(write=False)
            self._slots[sub_pool] = known
        return known

    def bind(self, sub_pool: int, index: Array | slice) -> Array:
        """[n] int64, owned: where a forward's n tokens are written.

        Args:
            sub_pool: which.
            index: their place among the plan's tokens; an array may hold -1 = the sink.
        """
        slots = self.slots(sub_pool)
        if isinstance(index, slice):
            return slots[index].copy()
        bound: Array = np.where(index == TO_SINK, SINK_SLOT, slots[index])
        return bound


def window_index(window: WriteWindow | None, *, rows: slice, starts: Array) -> Array | slice:
    """Which of the plan's tokens a forward of `rows` writes: an index for `WritePlan.bind`.

    Args:
        window: columns [b, e) of each row's tokens, tokens [b, e) of the plan, or a list of tokens of the plan. Tokens
            of the forward outside it write to the sink. None: all are written.
        rows: of the forward.
        starts: [R + 1] index of each row's first token, then T.
    """
    begin, end = int(starts[rows.start]), int(starts[rows.stop])
    if window is None:
        return slice(begin, end)
    tokens = np.arange(begin, end, dtype=np.int64)
    return np.where(_is_written(window, tokens, rows=rows, starts=starts), tokens, TO_SINK)


def _is_written(window: WriteWindow, tokens: Array, *, rows: slice, starts: Array) -> Array:
    if window.columns is not None:
        first = starts[rows.start : rows.stop]
        columns = tokens - np.repeat(first, np.diff(starts[rows.start : rows.stop + 1]))
        return _is_within(columns, window.columns)
    if window.run is not None:
        return _is_within(tokens, window.run)
    assert window.flat_index is not None, "exactly one field of a window is set"
    return np.isin(tokens, window.flat_index.astype(np.int64))


def _is_within(values: Array, span: tuple[int, int]) -> Array:
    inside: Array = (values >= span[0]) & (values < span[1])
    return inside
