"""Where a forward's rows read and write, page by page, as the canary looks at it.

Pure NumPy over a batch's host arrays. Guards: a page is looked at only as far as positions before the row's first
token go.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.batch.owned import Array
from worker_svc.batch.page_group import PageGroup
from worker_svc.kv.canary_table import FIRST, UNLISTED, PageReads, PageSpans


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLayout:
    """The rows and tokens of one forward. Host arrays."""

    prefix_lens: Array
    """[num_reqs] int64: positions written before this forward."""
    query_lens: Array
    """[num_reqs] int64: tokens computed now."""
    starts: Array
    """[num_reqs] int64: index of each row's first token."""
    token_rows: Array
    """[num_tokens] int64"""
    token_places: Array
    """[num_tokens] int64: which of its row's tokens."""


def row_layout(batch: ForwardBatch) -> RowLayout:
    """Of a batch without padding."""
    query_lens = batch.query_lens_host().astype(np.int64)
    starts = np.cumsum(query_lens) - query_lens
    token_rows = np.repeat(np.arange(batch.num_reqs), query_lens)
    return RowLayout(
        prefix_lens=batch.seq_lens_host.astype(np.int64) - query_lens,
        query_lens=query_lens,
        starts=starts,
        token_rows=token_rows,
        token_places=np.arange(len(token_rows)) - starts[token_rows],
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowReads:
    """What the rows of a forward read in one sub-pool."""

    rows: Array
    """[E] int64: the row of each page."""
    pages: PageReads
    last_slots: Array
    """[num_reqs] int64: slot of the position before the row's first token; 0: there is none, or it is not listed."""


def row_reads(layout: RowLayout, group: PageGroup, *, seeds: Tensor, page_size: int) -> RowReads:
    """Every page of which a row reads a part."""
    indptr, indices = group.kv_indptr_host.astype(np.int64), group.kv_indices_host.astype(np.int64)
    first_positions = group.start_positions_host.astype(np.int64)
    rows = np.repeat(np.arange(len(first_positions)), np.diff(indptr))
    places = np.arange(len(indices)) - indptr[rows]
    positions = first_positions[rows] + places * page_size
    needed = np.clip(layout.prefix_lens[rows] - positions, 0, page_size)
    before = np.where(places > 0, np.roll(indices, 1), np.where(positions > 0, UNLISTED, FIRST))
    read = np.flatnonzero(needed)
    device = seeds.device

    def placed(values: Array) -> Tensor:
        return torch.from_numpy(values).to(device)

    pages = PageReads(
        pages=placed(indices[read]),
        positions=placed(positions[read]),
        needed=placed(needed[read]),
        heads=seeds[placed(rows[read])],
        previous_pages=placed(before[read]),
    )
    return RowReads(rows=rows[read], pages=pages, last_slots=_last_slots(layout, group, page_size=page_size))


def page_spans(layout: RowLayout, positions: Array, *, page_size: int, device: torch.device) -> PageSpans:
    """The tokens of a forward, cut at the borders of pages and rows."""
    pages, offsets = np.divmod(positions, page_size)
    cuts = np.flatnonzero((np.diff(pages, prepend=-1) != 0) | (layout.token_places == 0))
    last = np.append(cuts[1:], len(positions)) - 1
    return PageSpans(
        first_tokens=torch.from_numpy(cuts).to(device),
        last_tokens=torch.from_numpy(last).to(device),
        begins=torch.from_numpy(offsets[cuts]).to(device),
        ends=torch.from_numpy(offsets[last] + 1).to(device),
    )


def _last_slots(layout: RowLayout, group: PageGroup, *, page_size: int) -> Array:
    last = layout.prefix_lens - 1
    place, offset = np.divmod(last - group.start_positions_host, page_size)
    is_listed = last >= group.start_positions_host
    entry = np.where(is_listed, group.kv_indptr_host[:-1] + place, 0)
    if not len(group.kv_indices_host):
        return np.zeros(len(last), np.int64)
    slots: Array = np.where(is_listed, group.kv_indices_host[entry].astype(np.int64) * page_size + offset, 0)
    return slots
