"""Memory of the tape's graphs: blocks of one range of addresses, given back when the last tensor on them is gone.

Knows nothing of operators. One capture session owns the whole arena while it is on; the graphs it leaves behind share
the memory with those of every other session, because no two of them replay at once. The range is reserved once, far
larger than any graph, and takes memory only as far as it was used: a shape with one large block finds room for it where
shapes with many small ones were. Guards: a block is reused only after every tensor on its storage, views and tensors
held by torch's own code included, is gone.
"""

import mmap
import weakref
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker_svc.device.device_graph import CaptureError

Array = np.ndarray

ALIGNMENT = 64
STEP_BYTES = 1 << 18
"""By which the used part grows, at least."""
RESERVED_BYTES = 1 << 36
"""Addresses, not memory. Halved until the system gives them: it may count addresses against a limit."""
_LEAST_RESERVED_BYTES = 1 << 26
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named from Python 3.13 on


@dataclass(frozen=True, slots=True, order=True)
class _Range:
    begin: int
    end: int


class TapeArena:
    """Grows, never shrinks. Not for several threads."""

    def __init__(self) -> None:
        self._memory: Array | None = None
        self._used = 0
        self._free: list[_Range] = []
        self._session = 0

    @property
    def num_bytes(self) -> int:
        """Of the part that was used."""
        return self._used

    def start_session(self) -> None:
        """Everything is free again. Tensors of earlier sessions keep their addresses, and lose their values."""
        self._session += 1
        self._free = [_Range(0, self._used)] if self._used else []

    def empty(self, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor on a block of its own.

        Raises:
            CaptureError: there are no addresses left for it.
        """
        span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        num_bytes = dtype.itemsize * (span if all(sizes) else 0)
        return self._block(num_bytes).view(dtype).as_strided(tuple(sizes), tuple(strides))

    def lasting(self, tensor: Tensor) -> Tensor | None:
        """The same elements at the same address, on a storage that blocks no memory. None if they are not in here."""
        if self._memory is None:
            return None
        offset = tensor.untyped_storage().data_ptr() - self._memory.ctypes.data
        if not 0 <= offset < self._used:
            return None
        first = torch.from_numpy(self._memory[offset : self._used])
        usable = len(first) // tensor.itemsize * tensor.itemsize
        return first[:usable].view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def poison(self, byte: int) -> None:
        """Fill all that was used: what a replay reads, it must have written."""
        if self._memory is not None:
            self._memory[: self._used].fill(byte)

    def _block(self, num_bytes: int) -> Tensor:
        """[at least num_bytes] uint8 on a storage of its own."""
        needed = max(ALIGNMENT, -(-num_bytes // ALIGNMENT) * ALIGNMENT)
        chosen = self._best_fit(needed) or self._grow(needed)
        self._free.remove(chosen)
        taken = _Range(chosen.begin, chosen.begin + needed)
        if taken.end < chosen.end:
            insort(self._free, _Range(taken.end, chosen.end))
        assert self._memory is not None
        block = self._memory[taken.begin : taken.end]
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
        """A free range of that many bytes at the end, joined with what is free there already."""
        if self._memory is None:
            self._memory = _reserved()
        last = self._free[-1] if self._free and self._free[-1].end == self._used else _Range(self._used, self._used)
        end = max(last.begin + needed, self._used + STEP_BYTES)
        if end > len(self._memory):
            raise CaptureError(f"a graph needs more than the {len(self._memory)} bytes of addresses that are reserved")
        self._free = [free for free in self._free if free is not last]
        self._used = end
        fresh = _Range(last.begin, end)
        insort(self._free, fresh)
        return fresh

    def _release(self, taken: _Range, session: int) -> None:
        if session != self._session:
            return
        begin, end = taken.begin, taken.end
        for free in self._free[:]:
            if free.end == begin or free.begin == end:
                self._free.remove(free)
                begin, end = min(begin, free.begin), max(end, free.end)
        insort(self._free, _Range(begin, end))


def _reserved() -> Array:
    """[as many as there are to have] uint8, zero, at an address that is a multiple of a page."""
    num_bytes = RESERVED_BYTES
    while True:
        try:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        except OSError as error:
            num_bytes //= 2
            if num_bytes < _LEAST_RESERVED_BYTES:
                raise CaptureError(f"the system reserves no addresses for graphs: {error}") from error
        else:
            return np.frombuffer(memory, np.uint8)
