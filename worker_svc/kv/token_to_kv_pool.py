"""The KV buffers of one sub-pool and their per-layer views.

Storage only: which page belongs to whom is the scheduler's business. Pages lie head by head, so that one head's page is
one contiguous run. Guards: page 0 is the sink, written by padding and never read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SINK_PAGE = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """Size of a sub-pool. `num_pages` counts the sink."""

    num_pages: int
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    sub_pool: int = 0
    """Which one of the worker's it is."""
    window_tokens: int = 0
    """A token sees so many of the latest ones, itself included; 0: all."""

    @property
    def bytes_per_page(self) -> int:
        """Keys and values of all layers."""
        elements = 2 * self.num_layers * self.num_kv_heads * self.page_size * self.head_dim
        return elements * self.dtype.itemsize

    @property
    def layout(self) -> str:
        """What must agree before one worker may read another's pages."""
        name = str(self.dtype).removeprefix("torch.")
        window = f".window{self.window_tokens}" if self.window_tokens else ""
        shape = f"layers{self.num_layers}.heads{self.num_kv_heads}.dim{self.head_dim}.page{self.page_size}"
        return f"{shape}{window}.{name}"


class TokenToKVPool:
    """Keys and values of every slot. Made once at start, lives as long as the process.

    Not cleared: attention is proof against whatever a slot at or past a row's length holds, and memory of pages that
    are never written is never touched.
    """

    def __init__(self, geometry: KVGeometry, *, device: torch.device) -> None:
        self.geometry = geometry
        shape = (
            geometry.num_layers,
            geometry.num_kv_heads,
            geometry.num_pages,
            geometry.page_size,
            geometry.head_dim,
        )
        self._keys = torch.empty(shape, dtype=geometry.dtype, device=device)
        self._values = torch.empty(shape, dtype=geometry.dtype, device=device)

    @property
    def num_slots(self) -> int:
        """Slots of all pages, the sink's included."""
        return self.geometry.num_pages * self.geometry.page_size

    def write(self, layer: int, *, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store one layer's keys and values, [num_tokens, num_kv_heads, head_dim], at `slots` [num_tokens] int64."""
        self._slot_view(self._keys, layer).index_copy_(1, slots, keys.transpose(0, 1))
        self._slot_view(self._values, layer).index_copy_(1, slots, values.transpose(0, 1))

    def keys(self, layer: int) -> Tensor:
        """[num_kv_heads, num_pages, page_size, head_dim], the buffer itself."""
        return self._keys[layer]

    def values(self, layer: int) -> Tensor:
        """[num_kv_heads, num_pages, page_size, head_dim], the buffer itself."""
        return self._values[layer]

    def _slot_view(self, buffer: Tensor, layer: int) -> Tensor:
        return buffer[layer].view(self.geometry.num_kv_heads, self.num_slots, self.geometry.head_dim)
