"""The rows of a step that have tokens, and their pages, for back-ends that read pages in place. NumPy alone."""

from dataclasses import dataclass

import numpy as np

from worker_svc.batch.page_group import PageGroup
from worker_svc.kv.token_to_kv_pool import KVGeometry

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTable:
    """Rows with at least one token each, unless all were asked for; arrays are the batch's own where they can be."""

    qo_indptr: Array
    """[num_rows + 1] int32: row r computes tokens qo_indptr[r]:qo_indptr[r + 1]."""
    seq_lens: Array
    """[num_rows] int32"""
    kv_indptr: Array
    """[num_rows + 1] int32"""
    kv_indices: Array
    """[kv_indptr[num_rows]] int32"""
    start_positions: Array
    """[num_rows] int32: position of the first slot of the row's first listed page."""

    @property
    def num_tokens(self) -> int:
        """Of all rows. Padding tokens, which stand behind them, are none of theirs."""
        return int(self.qo_indptr[-1])

    def last_page_lens(self, page_size: int) -> Array:
        """[num_rows] int32: used slots of each row's last page; 0 where it has none."""
        lens: Array = (self.seq_lens - self.start_positions - 1) % page_size + 1
        return np.where(np.diff(self.kv_indptr) > 0, lens, 0).astype(np.int32)


def whole_table(group: PageGroup, *, query_lens: Array, seq_lens: Array) -> RowTable:
    """The table of one sub-pool's pages with a line for every row, those without tokens too."""
    return RowTable(
        qo_indptr=_running_sum(query_lens),
        seq_lens=seq_lens,
        kv_indptr=group.kv_indptr_host,
        kv_indices=group.kv_indices_host,
        start_positions=group.start_positions_host,
    )


def sink_table(*, num_rows: int, num_tokens: int, num_pages: int) -> RowTable:
    """One row with all tokens, in the sink page so many times over, and others with none."""

    def steps_of(count: int) -> Array:
        return np.array([0, *([count] * num_rows)], np.int32)

    return RowTable(
        qo_indptr=steps_of(num_tokens),
        seq_lens=np.array([num_tokens, *([0] * (num_rows - 1))], np.int32),
        kv_indptr=steps_of(num_pages),
        kv_indices=np.zeros(num_pages, np.int32),
        start_positions=np.zeros(num_rows, np.int32),
    )


def most_pages(geometry: KVGeometry, *, context_tokens: int | None) -> int:
    """Most pages that one row lists; `context_tokens`: of the longest sequence, None if only the pool limits it."""
    in_pool = geometry.num_pages - 1
    return in_pool if context_tokens is None else min(in_pool, -(-context_tokens // geometry.page_size))


def row_table(group: PageGroup, *, query_lens: Array, seq_lens: Array) -> RowTable:
    """The table of one sub-pool's pages."""
    indptr, indices, starts = group.kv_indptr_host, group.kv_indices_host, group.start_positions_host
    if not query_lens.all():
        rows = np.flatnonzero(query_lens)
        counts = np.diff(indptr)
        indices = indices[np.repeat(query_lens > 0, counts)]
        indptr = _running_sum(counts[rows])
        query_lens, seq_lens, starts = query_lens[rows], seq_lens[rows], starts[rows]
    return RowTable(
        qo_indptr=_running_sum(query_lens),
        seq_lens=seq_lens,
        kv_indptr=indptr,
        kv_indices=indices,
        start_positions=starts,
    )


def _running_sum(counts: Array) -> Array:
    """[len + 1] int32, first 0."""
    sums = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums
