"""How host arrays come to the device before their plan's turn, and results back.

On the CPU arrays are copied one by one. On a GPU they go through a ring of page-locked slots, one for each plan in
flight, on a side stream, so that the host waits for nothing that runs. A slot is filled by whoever stages and read by
the device; its tensors are used by the device thread, after `Landing`.
Guards: a slot is written again only when the device has read it; nothing uses a tensor whose copy has not ended.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray
Landing = Callable[[], None]
"""Lets the device's further work wait for a slot's copies. Called on the device thread, before they are used."""

_ALIGNMENT = 64
_FIRST_SLOT_BYTES = 1 << 20


class StagingSlot(Protocol):
    """Of one plan, from its first array to its landing."""

    def put(self, host: Array) -> Tensor:
        """A device tensor that will hold a copy of `host`."""
        ...

    def landing(self) -> Landing:
        """Nothing more is put."""
        ...


class HostStaging(Protocol):
    """One per worker."""

    def slot(self) -> StagingSlot:
        """For the next plan."""
        ...


class Mark(Protocol):
    """A point in a side stream's work."""

    def wait_on_host(self) -> None:
        """Return when the work up to it is done."""
        ...


class SideCopies(Protocol):
    """A device's stream beside the one that computes. Made once; a fake in tests."""

    def page_locked(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 of the host."""
        ...

    def copy_in(self, source: Tensor) -> Tensor:
        """A device tensor that will be a copy of `source`, which is page-locked and must stay as it is until then."""
        ...

    def mark(self) -> Mark:
        """The end of what was asked for so far."""
        ...

    def compute_waits(self, mark: Mark, tensors: list[Tensor]) -> None:
        """What is computed from now on begins after `mark` and may use `tensors`. On the device thread."""
        ...

    def copy_out(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """Copies on the host of what is computed so far; waits for these and for nothing behind them."""
        ...


def device_copy(host: Array, device: torch.device) -> Tensor:
    """A device tensor of its own storage, also on the CPU."""
    return torch.from_numpy(np.array(host)).to(device)


class DirectStaging:
    """Each array copied by itself, at once. It is its own slot, for any number of plans: nothing is shared."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def slot(self) -> StagingSlot:
        """Itself."""
        return self

    def put(self, host: Array) -> Tensor:
        """A tensor of its own storage."""
        return device_copy(host, self._device)

    def landing(self) -> Landing:
        """Nothing is on its way."""
        return _landed


class PinnedStaging:
    """A ring of page-locked slots. Used by one thread, apart from landings."""

    def __init__(self, copies: SideCopies, *, num_slots: int) -> None:
        """Make the slots.

        Args:
            copies: of the device.
            num_slots: plans in flight.
        """
        self._slots = [_PinnedSlot(copies) for _ in range(num_slots)]
        self._next = 0

    def slot(self) -> StagingSlot:
        """The slot that was used longest ago; waits, if need be, until the device has read it."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.reuse()
        return slot


class _PinnedSlot:
    def __init__(self, copies: SideCopies) -> None:
        self._copies = copies
        self._buffer = copies.page_locked(_FIRST_SLOT_BYTES)
        self._used = 0
        self._tensors: list[Tensor] = []
        self._mark: Mark | None = None

    def reuse(self) -> None:
        if self._mark is not None:
            self._mark.wait_on_host()
        elif self._used:
            self._copies.mark().wait_on_host()  # a plan that was refused while it was staged
        self._used, self._tensors, self._mark = 0, [], None

    def put(self, host: Array) -> Tensor:
        array = np.ascontiguousarray(host)  # of no dimension it makes one
        begin = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        self._used = begin + array.nbytes
        if self._used > len(self._buffer):
            self._grow()
            begin = 0
            self._used = array.nbytes
        room = self._buffer[begin : begin + array.nbytes]
        room.numpy()[:] = array.reshape(-1).view(np.uint8)
        tensor = self._copies.copy_in(room.view(_torch_type(array.dtype)).view(host.shape))
        self._tensors.append(tensor)
        return tensor

    def landing(self) -> Landing:
        mark, tensors = self._copies.mark(), self._tensors
        self._mark, self._tensors = mark, []
        return lambda: self._copies.compute_waits(mark, tensors)

    def _grow(self) -> None:
        """A larger buffer. What still reads the old one is waited for: its memory is handed out again at once."""
        self._copies.mark().wait_on_host()
        self._buffer = self._copies.page_locked(max(2 * len(self._buffer), 2 * self._used))


def _landed() -> None:
    """Nothing to wait for."""


def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


ToHost = Callable[..., list[Array]]
"""Host arrays of device tensors, once what is computed so far is done."""


def direct_to_host(*tensors: Tensor) -> list[Array]:
    """One after the other, each waited for; of the CPU they are views."""
    return [tensor.detach().cpu().numpy() for tensor in tensors]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers:
    """Both ways."""

    staging: HostStaging
    to_host: ToHost


def direct_transfers(device: torch.device) -> Transfers:
    """Without a side stream."""
    return Transfers(staging=DirectStaging(device), to_host=direct_to_host)


def side_transfers(copies: SideCopies, *, num_slots: int) -> Transfers:
    """Beside the stream that computes."""

    def to_host(*tensors: Tensor) -> list[Array]:
        return [copy.numpy() for copy in copies.copy_out(tensors)]

    return Transfers(staging=PinnedStaging(copies, num_slots=num_slots), to_host=to_host)
