"""Tensors with lasting addresses at the borders of graphs, shared by all shapes and held for the process's life.

What enters a marked call, leaves it, or comes out at the end is copied here, so that no graph depends on memory that
another may have overwritten. The first capture is the largest, so a smaller shape gets the front of the same tensor.
Knows nothing of graphs. Guards: reserved before a capture, never made during one.
"""

from collections.abc import Hashable

from torch import Tensor

from worker_svc.device.device_graph import CaptureError, GraphDevice


class KeptTensors:
    """By place (which border, which tensor of it), dtype and row shape; the largest number of rows seen."""

    def __init__(self, device: GraphDevice) -> None:
        self._device = device
        self._kept: dict[Hashable, list[Tensor]] = {}

    def num_bytes(self) -> int:
        """Of all of them."""
        return sum(tensor.nbytes for tensors in self._kept.values() for tensor in tensors)

    def reserve(self, tensor: Tensor, place: Hashable) -> None:
        """Make room for `tensor` at `place`. A larger one than before gets a new address; graphs hold the old one."""
        tensors = self._kept.setdefault(_key(tensor, place), [])
        if not tensors or (tensor.dim() and len(tensors[-1]) < len(tensor)):
            tensors.append(self._device.like(tensor))

    def copy(self, tensor: Tensor, place: Hashable) -> Tensor:
        """The kept tensor of `place` with the values of `tensor`, contiguous.

        Raises:
            CaptureError: nothing of this shape was reserved: the work took another way than when it was warmed up.
        """
        tensors = self._kept.get(_key(tensor, place))
        if not tensors or (tensor.dim() and len(tensors[-1]) < len(tensor)):
            raise CaptureError(f"the work gave {tuple(tensor.shape)} of {tensor.dtype} at {place}, unlike its warm-up")
        kept = tensors[-1][: len(tensor)] if tensor.dim() else tensors[-1]
        return kept.copy_(tensor)


def _key(tensor: Tensor, place: Hashable) -> Hashable:
    return place, tensor.dtype, tensor.shape[1:], tensor.dim()
