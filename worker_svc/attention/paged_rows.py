"""Gathers whole rows of KV from pages, rows of similar length together.

Shared by the torch back-ends. Guards: a gathered row is finite wherever its own slots are: pages it does not have read
as its first page, and the unused slots of its last page read as zero, whatever the pool holds there.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker_svc.batch.page_group import PageGroup
from worker_svc.kv.token_to_kv_pool import TokenToKVPool

Array = np.ndarray

MAX_GATHERED_SLOTS = 1 << 15
"""Of one gather, as long as it holds more than one row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedRows:
    """Some rows of a batch, gathered to one width. Made once per step, owned by its metadata."""

    rows: Array
    """[n] rows of the batch."""
    firsts: Array
    """[n] int64: position of each row's first gathered slot."""
    width: int
    """Slots gathered per row, a multiple of the page size."""
    pages: Tensor
    """[n * width / page_size] int64, on the device."""
    unused: Tensor
    """[m] int64, on the device: gathered slots that may copy an unused slot of the row's last page."""

    def gather(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        """[num_kv_heads, n, width, head_dim], owned, from a layer's [num_kv_heads, num_pages, page_size, head_dim]."""
        heads, _, _, head_dim = buffer.shape
        gathered = buffer.index_select(1, self.pages).view(heads, -1, head_dim).to(dtype)
        if self.unused.numel():
            gathered.index_fill_(1, self.unused, 0)
        return gathered.view(heads, len(self.rows), self.width, head_dim)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FixedRows:
    """`PagedRows` of a captured graph: as many rows of one width as it was made for, on tensors that keep addresses."""

    pages: Tensor
    """[n * width / page_size] int64"""
    unused: Tensor
    """[1, n * width, 1] bool: as `PagedRows.unused`."""
    num_rows: int
    width: int

    def gather(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        """See `PagedRows.gather`."""
        heads, _, _, head_dim = buffer.shape
        gathered = buffer.index_select(1, self.pages).view(heads, -1, head_dim).to(dtype)
        return gathered.masked_fill(self.unused, 0).view(heads, self.num_rows, self.width, head_dim)

    def fill(self, rows: PagedRows) -> None:
        """Take over `rows`, of the same number and width."""
        self.pages.copy_(rows.pages)
        self.unused.zero_().index_fill_(1, rows.unused, 1)


def visible_slots(slots: Array, positions: Array, *, window_tokens: int) -> Array:
    """bool: which `slots`, by position, a token at each of `positions` sees; broadcast."""
    seen: Array = slots <= positions
    return seen & (slots > positions - window_tokens) if window_tokens else seen


def first_slots(group: PageGroup, *, unit: int) -> Array:
    """[num_reqs] int64: where gathering begins, the last multiple of `unit` at or before the first listed page."""
    firsts: Array = group.start_positions_host.astype(np.int64) // unit * unit
    return firsts


def group_by_length(rows: Array, spans: Array, *, unit: int) -> list[tuple[Array, int]]:
    """Rows whose spans need the same power-of-two number of `unit` slots, each group with its width.

    So at most half of what is gathered is padding, whatever spans meet in a batch, and a gather stays small.

    Args:
        rows: of the batch.
        spans: [num_reqs] slots from a row's first gathered one to its last.
        unit: what widths are multiples of.
    """
    units = -(-spans[rows] // unit)
    classes = np.ceil(np.log2(np.maximum(units, 1))).astype(np.int64)
    groups = []
    for size_class in np.unique(classes):
        members = rows[classes == size_class]
        width = int(units[classes == size_class].max()) * unit
        most = max(1, MAX_GATHERED_SLOTS // width)
        groups += [(members[begin : begin + most], width) for begin in range(0, len(members), most)]
    return groups


def paged_rows(
    rows: Array, group: PageGroup, seq_lens: Array, *, firsts: Array, width: int, pool: TokenToKVPool
) -> PagedRows:
    """How to gather `rows` at `width` slots each, from `firsts` [num_reqs] on. `width` covers the longest of them."""
    page_size = pool.geometry.page_size
    starts = group.kv_indptr_host[rows].astype(np.int64)
    lens, begins = seq_lens[rows].astype(np.int64), group.start_positions_host[rows].astype(np.int64)
    own = (-(-lens // page_size) - begins // page_size)[:, None]
    columns = np.arange(width // page_size) - ((begins - firsts[rows]) // page_size)[:, None]
    is_own = (columns >= 0) & (columns < own)
    places = starts[:, None] + np.where(is_own, columns, 0)
    is_past = firsts[rows][:, None] + np.arange(width) >= lens[:, None]
    is_own_slot = np.repeat(is_own, page_size, axis=1)
    # A first page that stands in for missing ones is itself not full only when it is the row's last.
    unused = np.where(own == 1, is_past | ~is_own_slot, is_past & is_own_slot)
    device = pool.keys(0).device
    return PagedRows(
        rows=rows,
        firsts=firsts[rows],
        width=width,
        pages=torch.from_numpy(group.kv_indices_host[places].astype(np.int64).ravel()).to(device),
        unused=torch.from_numpy(np.flatnonzero(unused)).to(device),
    )
