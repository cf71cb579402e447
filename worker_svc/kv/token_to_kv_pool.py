"""The KV buffers of one sub-pool and their per-layer views.

Storage only: which page belongs to whom is the scheduler's business. The attention back-end chooses the order of the
elements; everybody else sees one view of it. Guards: page 0 is the sink, written by padding and never read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.device.kv_writer import kv_writer
from worker_svc.kv.kv_order import KVOrder
from worker_svc.kv.kv_views import PageShape, head_views, layer_shape
from worker_svc.kv.sizing import running_limit

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
    """A token sees so many of the latest ones, itself included, and pages of others are given up; 0: all."""
    seen_tokens: int = 0
    """A token sees so many of the latest ones though pages of all are kept; 0: as `window_tokens` says."""
    order: KVOrder = KVOrder.HEADS

    @property
    def attention_window(self) -> int:
        """A token sees so many of the latest ones, itself included; 0: all."""
        return self.window_tokens or self.seen_tokens

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
        order = "" if self.order is KVOrder.HEADS else f".{self.order.value}"
        return f"{shape}{window}{order}.{name}"

    def running_limit(self, *, context_tokens: int, asked: int) -> int:
        """Most requests that may run at once in this sub-pool."""
        capacity_tokens = (self.num_pages - 1) * self.page_size
        return running_limit(capacity_tokens=capacity_tokens, context_tokens=context_tokens, asked=asked)

    @property
    def page_shape(self) -> PageShape:
        """Of one layer."""
        return PageShape(
            num_pages=self.num_pages,
            page_size=self.page_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )


class TokenToKVPool:
    """Keys and values of every slot. Made once at start, lives as long as the process.

    Not cleared: attention is proof against whatever a slot at or past a row's length holds, and memory of pages that
    are never written is never touched.
    """

    def __init__(self, geometry: KVGeometry, *, device: torch.device) -> None:
        self.geometry = geometry
        shape = (geometry.num_layers, *layer_shape(geometry.order, geometry.page_shape))
        self._buffer = torch.empty(shape, dtype=geometry.dtype, device=device)
        self._write = kv_writer(device)
        self._views = [head_views(geometry.order, layer, geometry.page_shape) for layer in self._buffer]

    @property
    def num_slots(self) -> int:
        """Slots of all pages, the sink's included."""
        return self.geometry.num_pages * self.geometry.page_size

    def write(self, layer: int, *, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store one layer's keys and values, [num_tokens, num_kv_heads, head_dim], at `slots` [num_tokens] int64.

        They are rounded to the pool's type.
        """
        for view, new in zip(self._views[layer], (keys, values), strict=True):
            self._write(new, slots, view)

    def keys(self, layer: int) -> Tensor:
        """[num_kv_heads, num_pages, page_size, head_dim], the buffer itself."""
        return self._views[layer][0]

    def values(self, layer: int) -> Tensor:
        """[num_kv_heads, num_pages, page_size, head_dim], the buffer itself."""
        return self._views[layer][1]

    def pages(self, layer: int) -> Tensor:
        """Keys and values in the pool's own order, for a back-end that reads pages in place."""
        return self._buffer[layer]
