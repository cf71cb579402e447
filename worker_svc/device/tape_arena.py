"""Memory of the tape's graphs: blocks of a few large segments, given back when the last tensor on them is gone.

Knows nothing of operators. One capture session owns the whole arena while it is on; the graphs it leaves behind share
the memory with those of every other session, because no two of them replay at once. Guards: a block is reused only
after every tensor on its storage, views and tensors held by torch's own code included, is gone.
"""

import weakref
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray

ALIGNMENT = 64
SEGMENT_BYTES = 1 << 20
"""Of a new segment, unless one block needs more."""


@dataclass(frozen=True, slots=True, order=True)
class _Range:
    segment: int
    begin: int
    end: int


class TapeArena:
    """Grows, never shrinks. Not for several threads."""

    def __init__(self) -> None:
        self._segments: list[Array] = []
        self._free: list[_Range] = []
        self._session = 0

    @property
    def num_bytes(self) -> int:
        """Of all segments."""
        return sum(len(segment) for segment in self._segments)

    def start_session(self) -> None:
        """Everything is free again. Tensors of earlier sessions keep their addresses, and lose their values."""
        self._session += 1
        self._free = [_Range(index, 0, len(segment)) for index, segment in enumerate(self._segments)]

    def empty(self, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor on a block of its own."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        num_bytes = dtype.itemsize * (span if all(sizes) else 0)
        return self._block(num_bytes).view(dtype).as_strided(tuple(sizes), tuple(strides))

    def lasting(self, tensor: Tensor) -> Tensor | None:
        """The same elements at the same address, on a storage that blocks no memory. None if they are not in here."""
        begin = tensor.untyped_storage().data_ptr()
        for segment in self._segments:
            offset = begin - segment.ctypes.data
            if 0 <= offset < len(segment):
                first = torch.from_numpy(segment[offset:]).view(torch.uint8)
                usable = len(first) // tensor.itemsize * tensor.itemsize
                return (
                    first[:usable].view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                )
        return None

    def poison(self, byte: int) -> None:
        """Fill every segment: what a replay reads, it must have written."""
        for segment in self._segments:
            segment.fill(byte)

    def _block(self, num_bytes: int) -> Tensor:
        """[at least num_bytes] uint8 on a storage of its own."""
        needed = max(ALIGNMENT, -(-num_bytes // ALIGNMENT) * ALIGNMENT)
        chosen = self._best_fit(needed) or self._grow(needed)
        self._free.remove(chosen)
        taken = _Range(chosen.segment, chosen.begin, chosen.begin + needed)
        if taken.end < chosen.end:
            insort(self._free, _Range(chosen.segment, taken.end, chosen.end))
        block = self._segments[taken.segment][taken.begin : taken.end]
        # torch's storage holds this array until the last tensor on it is gone.
        weakref.finalize(block, self._release, taken, self._session).atexit = False
        return torch.from_numpy(block)

    def _best_fit(self, needed: int) -> _Range | None:
        return min(
            (free for free in self._free if free.end - free.begin >= needed),
            key=lambda free: free.end - free.begin,
            default=None,
        )

    def _grow(self, needed: int) -> _Range:
        num_bytes = max(needed, SEGMENT_BYTES)
        raw = np.zeros(num_bytes + ALIGNMENT, np.uint8)
        shift = -raw.ctypes.data % ALIGNMENT
        self._segments.append(raw[shift : shift + num_bytes])
        fresh = _Range(len(self._segments) - 1, 0, num_bytes)
        insort(self._free, fresh)
        return fresh

    def _release(self, taken: _Range, session: int) -> None:
        if session != self._session:
            return
        begin, end = taken.begin, taken.end
        for free in [free for free in self._free if free.segment == taken.segment]:
            if free.end == begin or free.begin == end:
                self._free.remove(free)
                begin, end = min(begin, free.begin), max(end, free.end)
        insort(self._free, _Range(taken.segment, begin, end))
