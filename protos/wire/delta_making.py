"""A plan as changes of a base plan; `delta` says what that means and turns it back.

Vectorised over rows: a row goes on from the base's row of the same handle if everything a delta leaves to the base is
equal there, and is in full otherwise.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from protos.wire import columns
from protos.wire.delta import skipped_pages
from protos.wire.delta_columns import (
    FRESH_COLUMNS,
    OPTIONAL_FRESH_COLUMNS,
    PRESENCE,
    SOFT_COLUMNS,
    SOFT_TABLES,
    RowSources,
    SoftColumn,
    SoftTable,
    present_names,
    soft_table,
    soft_values,
)
from protos.wire.plan import ForwardPlan, PageTable, PenaltyColumns, PlanDelta, RowColumns, SamplingColumns
from protos.wire.ragged import indptr_of, same_spans, span_indexes

Array = np.ndarray

_NO_U8, _NO_I32 = columns.EMPTY[columns.U8], columns.EMPTY[columns.I32]


def changes_of(
    plan: ForwardPlan, base: ForwardPlan, *, digest: bytes, base_digest: bytes, page_sizes: Sequence[int]
) -> ForwardPlan | None:
    """`plan` as a delta; None if nothing of it goes on from `base`, or it holds what deltas cannot say.

    Args:
        plan: valid and complete.
        base: an earlier one for the same worker.
        digest: of `plan`.
        base_digest: of `base`.
        page_sizes: of each sub-pool.
    """
    if plan.rows.length_source_seqs is not None or plan.rows.length_source_rows is not None:
        return None
    sources = _sources(plan, base, page_sizes=page_sizes)
    if not len(sources.kept):
        return None
    base_rows = np.zeros(sources.num_rows, columns.U32)
    base_rows[sources.kept] = sources.base + 1
    present = np.array([PRESENCE.index(name) for name in present_names(plan)], columns.U8)
    pairs = zip(plan.page_tables, base.page_tables, page_sizes, strict=True)
    return replace(
        plan,
        rows=_rows(plan, sources),
        page_tables=tuple(_page_table(table, of_base, sources, page_size=size) for table, of_base, size in pairs),
        sampling=_sampling(plan, sources),
        penalties=_penalties(plan, base, sources),
        delta=PlanDelta(
            base_seq=base.identity.seq, base_digest=base_digest, base_rows=base_rows, digest=digest, present=present
        ),
    )


def _sources(plan: ForwardPlan, base: ForwardPlan, *, page_sizes: Sequence[int]) -> RowSources:
    """The rows that can go on from the base."""
    order = np.argsort(base.rows.handles, kind="stable")
    places = np.searchsorted(base.rows.handles, plan.rows.handles, sorter=order)
    kept = np.flatnonzero(places < len(order))
    candidates = order[places[kept]]
    same = base.rows.handles[candidates] == plan.rows.handles[kept]
    pairs = _Pairs(plan, base, kept[same], candidates[same])
    for column in SOFT_COLUMNS:
        pairs.keep(pairs.same_values(column))
    for table in SOFT_TABLES:
        pairs.keep(pairs.same_table(table))
    pairs.keep(pairs.same_first_outputs())
    for table_pair in zip(plan.page_tables, base.page_tables, page_sizes, strict=True):
        pairs.keep(pairs.same_first_pages(*table_pair))
    in_full = np.ones(plan.rows.num_rows, bool)
    in_full[pairs.rows] = False
    return RowSources(pairs.rows, pairs.base_rows, np.flatnonzero(in_full), plan.rows.num_rows)


class _Pairs:
    """Rows of the plan and the base's rows of the same handles; those that differ are dropped step by step."""

    def __init__(self, plan: ForwardPlan, base: ForwardPlan, rows: Array, base_rows: Array) -> None:
        self._plan, self._base = plan, base
        self.rows, self.base_rows = rows, base_rows

    def keep(self, chosen: Array | None) -> None:
        """None: all, since neither plan has what was compared."""
        if chosen is not None and not chosen.all():
            self.rows, self.base_rows = self.rows[chosen], self.base_rows[chosen]

    def same_values(self, column: SoftColumn) -> Array | None:
        mine, theirs = soft_values(self._plan, column), soft_values(self._base, column)
        if mine is None and theirs is None:
            return None
        mine_now = np.full(len(self.rows), column.neutral, column.dtype) if mine is None else mine[self.rows]
        base_now = np.full(len(self.rows), column.neutral, column.dtype) if theirs is None else theirs[self.base_rows]
        same: Array = (_bytes(mine_now) == _bytes(base_now)).all(axis=1)
        return same

    def same_table(self, table: SoftTable) -> Array | None:
        mine, theirs = soft_table(self._plan, table), soft_table(self._base, table)
        if mine is None and theirs is None:
            return None
        starts, lens = _spans(None if mine is None else mine[table.indptr], self.rows)
        base_starts, base_lens = _spans(None if theirs is None else theirs[table.indptr], self.base_rows)
        same: Array = lens == base_lens
        if mine is None or theirs is None:
            return same
        compared = np.where(same, lens, 0)
        for name, _ in table.contents:
            same &= same_spans(mine[name], starts, theirs[name], base_starts, lens=compared)
        return same

    def same_first_outputs(self) -> Array | None:
        """Whether the base's output ids are the first of the row's."""
        mine, theirs = self._plan.penalties, self._base.penalties
        if mine is None and theirs is None:
            return None
        starts, lens = _spans(None if mine is None else mine.output_indptr, self.rows)
        base_starts, base_lens = _spans(None if theirs is None else theirs.output_indptr, self.base_rows)
        same: Array = base_lens <= lens
        if mine is None or theirs is None:
            return same
        compared = np.where(same, base_lens, 0)
        same &= same_spans(mine.output_ids, starts, theirs.output_ids, base_starts, lens=compared)
        return same

    def same_first_pages(self, table: PageTable, base: PageTable, page_size: int) -> Array:
        """Whether what is left of the base's pages are the first of the row's, and the rest of the table follows."""
        sources = RowSources(self.rows, self.base_rows, _NO_I32, len(self.rows))
        skips = skipped_pages(table, base, sources, page_size=page_size)
        starts, lens = _spans(table.indptr, self.rows)
        base_starts, base_lens = _spans(base.indptr, self.base_rows)
        left = base_lens - skips
        same: Array = (skips >= 0) & (left >= 0) & (left <= lens)
        compared = np.where(same, left, 0)
        same &= same_spans(table.indices, starts, base.indices, base_starts + skips, lens=compared)
        return same


def _bytes(values: Array) -> Array:
    return values.view(np.uint8).reshape(len(values), values.dtype.itemsize)


def _spans(indptr: Array | None, rows: Array) -> tuple[Array, Array]:
    """(starts, lengths) of the rows, int64; empty where there is no table."""
    if indptr is None:
        return np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    wide = indptr.astype(np.int64)
    return wide[:-1][rows], np.diff(wide)[rows]


def _soft_part(group: str, plan: ForwardPlan, sources: RowSources) -> dict[str, Array]:
    """The group's soft columns and tables for the rows in full."""
    part: dict[str, Array] = {}
    for column in SOFT_COLUMNS:
        values = soft_values(plan, column) if column.group == group else None
        if values is not None:
            part[column.name] = values[sources.full]
    for table in SOFT_TABLES:
        found = soft_table(plan, table) if table.group == group else None
        if found is not None:
            starts, lens = _spans(found[table.indptr], sources.full)
            part[table.indptr] = indptr_of(lens, columns.U32) if len(lens) else columns.EMPTY[columns.U32]
            part |= {name: found[name][span_indexes(starts, lens)] for name, _ in table.contents}
    return part


def _rows(plan: ForwardPlan, sources: RowSources) -> RowColumns:
    fresh = {name: getattr(plan.rows, name) for name in (*FRESH_COLUMNS, *OPTIONAL_FRESH_COLUMNS)}
    return RowColumns(first_positions=_NO_I32, **fresh, **_soft_part("rows", plan, sources))


def _sampling(plan: ForwardPlan, sources: RowSources) -> SamplingColumns | None:
    return None if plan.sampling is None else SamplingColumns(**_soft_part("sampling", plan, sources))


def _penalties(plan: ForwardPlan, base: ForwardPlan, sources: RowSources) -> PenaltyColumns | None:
    """Output entries that are new or have another count; of rows in full, all."""
    penalties, of_base = plan.penalties, base.penalties
    if penalties is None:
        return None
    rows = np.arange(sources.num_rows)
    starts, lens = _spans(penalties.output_indptr, rows)
    changed = np.ones(len(penalties.output_ids), bool)
    if of_base is not None:
        base_starts, base_lens = _spans(of_base.output_indptr, sources.base)
        mine = span_indexes(starts[sources.kept], base_lens)
        changed[mine] = penalties.output_counts[mine] != of_base.output_counts[span_indexes(base_starts, base_lens)]
    counts = np.bincount(np.repeat(rows, lens)[changed], minlength=sources.num_rows)
    return PenaltyColumns(
        **_soft_part("penalties", plan, sources),
        output_indptr=indptr_of(counts, columns.U32) if changed.any() else columns.EMPTY[columns.U32],
        output_ids=penalties.output_ids[changed],
        output_counts=penalties.output_counts[changed],
    )


def _page_table(table: PageTable, base: PageTable, sources: RowSources, *, page_size: int) -> PageTable:
    starts, lens = _spans(table.indptr, np.arange(sources.num_rows))
    _, base_lens = _spans(base.indptr, sources.base)
    held = np.zeros(sources.num_rows, np.int64)
    held[sources.kept] = base_lens - skipped_pages(table, base, sources, page_size=page_size)
    added = lens - held
    return replace(
        table,
        indptr=indptr_of(added, columns.I32) if added.any() else _NO_I32,
        indices=table.indices[span_indexes(starts + held, added)],
        last_page_lens=_NO_I32,
        written_pages=_NO_I32,
    )
