"""Plans as changes of a base plan, and back. Soft state: whoever lacks the base asks for the plan in full.

    base_rows[r] = k > 0   row r goes on from row k - 1 of the base: soft columns are the base's; pages the base's from
                           `start_positions` on, then the delta's; output counts the base's, changed by the delta's
    base_rows[r] = 0       row r is in full

Lengths, samples, tokens, masks and log-probabilities are in the delta for every row. Guards: `complete` of a delta is
the plan it was made of, or an error: the digest of the whole plan travels along.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from protos.wire import columns, limits
from protos.wire.delta_columns import (
    FRESH_COLUMNS,
    OPTIONAL_FRESH_COLUMNS,
    PRESENCE,
    SOFT_COLUMNS,
    SOFT_TABLES,
    RowSources,
    checked,
    checked_indptr,
    merged_column,
    merged_table,
    row_sources,
)
from protos.wire.digest import plan_digest
from protos.wire.errors import InvalidPlan, NeedFullPlan
from protos.wire.plan import ForwardPlan, PageTable, PenaltyColumns, RowColumns, SamplingColumns
from protos.wire.ragged import joined_spans, span_indexes

Array = np.ndarray


class Base(NamedTuple):
    """A complete plan that others may name."""

    plan: ForwardPlan
    digest: bytes


def complete(delta_plan: ForwardPlan, held: Base | None, *, page_sizes: Sequence[int]) -> ForwardPlan:
    """The plan that a delta stands for.

    Args:
        delta_plan: as it was decoded; its `delta` is present.
        held: the plan of `delta.base_seq`; None if it is gone.
        page_sizes: of each sub-pool.

    Raises:
        NeedFullPlan: the base is gone or another one, or what came out is not what was sent.
        InvalidPlan: the delta's columns do not fit each other or the base.
    """
    delta = delta_plan.delta
    assert delta is not None
    seq = delta_plan.identity.seq
    if held is None or held.digest != delta.base_digest:
        raise NeedFullPlan(f"plan {seq} changes plan {delta.base_seq}, which is not here", plan_seq=seq)
    base = held.plan
    num_rows = len(delta.base_rows)
    if num_rows > limits.MAX_PLAN_ROWS:
        raise InvalidPlan(f"delta.base_rows has {num_rows} rows", field="delta.base_rows", plan_seq=seq)
    sources = row_sources(delta.base_rows, num_base_rows=base.rows.num_rows)
    rows = _rows(delta_plan, base, sources)
    plan = replace(
        delta_plan,
        rows=rows,
        page_tables=_page_tables(delta_plan, base, sources, rows=rows, page_sizes=page_sizes),
        sampling=_sampling(delta_plan, base, sources),
        penalties=_penalties(delta_plan, base, sources),
        delta=None,
    )
    if plan_digest(plan) != delta.digest:
        raise NeedFullPlan(f"plan {seq} as a change of plan {delta.base_seq} is not what was sent", plan_seq=seq)
    return plan


def _present(delta_plan: ForwardPlan) -> set[str]:
    assert delta_plan.delta is not None
    numbers = delta_plan.delta.present.tolist()
    if any(number >= len(PRESENCE) for number in numbers):
        raise InvalidPlan(f"delta.present names {max(numbers)}, which is not known here", field="delta.present")
    return {PRESENCE[number] for number in numbers}


def _merged(group: str, delta_plan: ForwardPlan, base: ForwardPlan, sources: RowSources) -> dict[str, Any]:
    """The group's soft columns and tables that the plan has."""
    present = _present(delta_plan)
    found: dict[str, Any] = {
        column.name: merged_column(column, base, delta_plan, sources)
        for column in SOFT_COLUMNS
        if column.group == group and (not column.optional or column.path in present)
    }
    for table in SOFT_TABLES:
        if table.group == group and (not table.optional or f"{group}.{table.indptr}" in present):
            found |= merged_table(table, base, delta_plan, sources)
    return found


def _rows(delta_plan: ForwardPlan, base: ForwardPlan, sources: RowSources) -> RowColumns:
    fresh: dict[str, Array] = {}
    for name in FRESH_COLUMNS:
        fresh[name] = checked(f"rows.{name}", getattr(delta_plan.rows, name), length=sources.num_rows)
    for name in OPTIONAL_FRESH_COLUMNS:
        values = getattr(delta_plan.rows, name)
        if values is not None:
            fresh[name] = checked(f"rows.{name}", values, length=sources.num_rows)
    first_positions = (fresh["seq_lens"].astype(np.int64) - fresh["extend_lens"]).astype(columns.I32)
    make: Callable[..., RowColumns] = RowColumns
    return make(first_positions=first_positions, **fresh, **_merged("rows", delta_plan, base, sources))


def _sampling(delta_plan: ForwardPlan, base: ForwardPlan, sources: RowSources) -> SamplingColumns | None:
    if "sampling" not in _present(delta_plan):
        return None
    return SamplingColumns(**_merged("sampling", delta_plan, base, sources))


def _penalties(delta_plan: ForwardPlan, base: ForwardPlan, sources: RowSources) -> PenaltyColumns | None:
    if "penalties" not in _present(delta_plan):
        return None
    outputs = _outputs(delta_plan, base, sources)
    return PenaltyColumns(**_merged("penalties", delta_plan, base, sources), **outputs)


def _outputs(delta_plan: ForwardPlan, base: ForwardPlan, sources: RowSources) -> dict[str, Array]:
    """Output ids and counts: the base's, then the delta's entries, which replace the count of an id or append it."""
    changes, path = delta_plan.penalties, "penalties.output_indptr"
    indptr = checked_indptr(path, None if changes is None else changes.output_indptr, num_rows=sources.num_rows)
    ids = checked("penalties.output_ids", None if changes is None else changes.output_ids, length=int(indptr[-1]))
    counts = checked(
        "penalties.output_counts", None if changes is None else changes.output_counts, length=int(indptr[-1])
    )
    base_lens, base_starts = np.zeros(sources.num_rows, np.int64), np.zeros(sources.num_rows, np.int64)
    base_ids, base_counts = np.empty(0, columns.U32), np.empty(0, columns.U32)
    if base.penalties is not None:
        base_indptr = base.penalties.output_indptr.astype(np.int64)
        base_ids, base_counts = base.penalties.output_ids, base.penalties.output_counts
        base_lens[sources.kept] = np.diff(base_indptr)[sources.base]
        base_starts[sources.kept] = base_indptr[:-1][sources.base]
    taken = span_indexes(base_starts, base_lens)
    known = _keys(np.repeat(np.arange(sources.num_rows), base_lens), base_ids[taken])
    change_rows = np.repeat(np.arange(sources.num_rows), np.diff(indptr))
    order = np.argsort(known, kind="stable")
    wanted = _keys(change_rows, ids)
    places = np.searchsorted(known, wanted, sorter=order)
    replaces = np.zeros(len(wanted), bool)
    inside = places < len(known)
    replaces[inside] = known[order[places[inside]]] == wanted[inside]
    new_counts = base_counts[taken].copy()
    new_counts[order[places[replaces]]] = counts[replaces]
    starts = np.cumsum(base_lens) - base_lens
    added = np.bincount(change_rows[~replaces], minlength=sources.num_rows)
    lens = {"second_lens": added}
    whole, all_ids = joined_spans(base_ids[taken], starts, base_lens, second=ids[~replaces], **lens)
    _, all_counts = joined_spans(new_counts, starts, base_lens, second=counts[~replaces], **lens)
    return {"output_indptr": whole.astype(columns.U32), "output_ids": all_ids, "output_counts": all_counts}


def _keys(rows: Array, ids: Array) -> Array:
    """One number for a row and an id. Rows are few."""
    keys: Array = (rows.astype(np.uint64) << np.uint64(32)) | ids.astype(np.uint64)
    return keys


def _page_tables(
    delta_plan: ForwardPlan, base: ForwardPlan, sources: RowSources, *, rows: RowColumns, page_sizes: Sequence[int]
) -> tuple[PageTable, ...]:
    count = len(delta_plan.page_tables)
    if not count == len(base.page_tables) == len(page_sizes):
        raise InvalidPlan(f"page_tables of a delta has {count} tables, not {len(page_sizes)}", field="page_tables")
    triples = zip(delta_plan.page_tables, base.page_tables, page_sizes, strict=True)
    return tuple(_page_table(table, of_base, sources, rows=rows, page_size=size) for table, of_base, size in triples)


def _page_table(
    table: PageTable, base: PageTable, sources: RowSources, *, rows: RowColumns, page_size: int
) -> PageTable:
    path = "page_tables.indptr"
    indptr = checked_indptr(path, table.indptr, num_rows=sources.num_rows)
    checked("page_tables.indices", table.indices, length=int(indptr[-1]))
    if table.start_positions is not None:
        checked("page_tables.start_positions", table.start_positions, length=sources.num_rows)
    skips = skipped_pages(table, base, sources, page_size=page_size)
    kept_lens, kept_starts = np.zeros(sources.num_rows, np.int64), np.zeros(sources.num_rows, np.int64)
    kept_lens[sources.kept] = np.diff(base.indptr.astype(np.int64))[sources.base] - skips
    kept_starts[sources.kept] = base.indptr[:-1][sources.base] + skips
    if (skips < 0).any() or (kept_lens < 0).any():
        raise InvalidPlan("page_tables.start_positions do not go on from the base's", field=path)
    whole, indices = joined_spans(
        base.indices, kept_starts, kept_lens, second=table.indices, second_lens=np.diff(indptr)
    )
    seq_lens = rows.seq_lens.astype(np.int64)
    written_lens = -(-seq_lens // page_size) - rows.first_positions.astype(np.int64) // page_size
    if (written_lens < 0).any() or (written_lens > np.diff(whole)).any():
        raise InvalidPlan("rows.seq_lens of a delta go beyond the pages", field="rows.seq_lens")
    return replace(
        table,
        indptr=whole.astype(columns.I32),
        indices=indices,
        last_page_lens=((seq_lens - 1) % page_size + 1).astype(columns.I32),
        written_pages=indices[span_indexes(whole[1:] - written_lens, written_lens)],
    )


def skipped_pages(table: PageTable, base: PageTable, sources: RowSources, *, page_size: int) -> Array:
    """[k] int64: how many of the base row's first pages a row that goes on from it no longer lists."""
    starts = [
        np.zeros(len(wanted), np.int64)
        if held.start_positions is None
        else held.start_positions[wanted].astype(np.int64)
        for held, wanted in ((table, sources.kept), (base, sources.base))
    ]
    skips: Array = (starts[0] - starts[1]) // page_size
    return skips
