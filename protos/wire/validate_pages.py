"""Invariants of the page tables and page operations: what keeps one row out of another's memory. Part of `validate`.

one row of a table     indices[indptr[r] : indptr[r + 1]]
positions it holds     [start_position, seq_len), start_position a multiple of page_size
of those, written now  [first_position, seq_len): the row's trailing pages
"""

import numpy as np

from protos.wire import columns
from protos.wire.checks import bad_value, check_equal, check_indptr, check_length, check_range, csr_row
from protos.wire.enums import SubPoolKind
from protos.wire.errors import InvalidPlan, UnsupportedFeature
from protos.wire.plan import ForwardPlan, PageTable
from protos.wire.worker_info import SubPool, WorkerInfo

COPY, ZERO = 1, 2
"""Kinds of page operations."""
BEFORE, AFTER = 1, 2
"""Their order, relative to the forwards."""


def check_page_tables(plan: ForwardPlan, info: WorkerInfo) -> None:
    """One table per sub-pool of the worker, in its order, each listing exactly the pages its rows need."""
    if len(plan.page_tables) != len(info.sub_pools):
        text = f"page_tables has {len(plan.page_tables)} tables, this worker has {len(info.sub_pools)} sub-pools"
        raise InvalidPlan(text, field="page_tables")
    for index, (table, sub_pool) in enumerate(zip(plan.page_tables, info.sub_pools, strict=True)):
        if table.sub_pool != index:
            text = f"page_tables.sub_pool is {table.sub_pool} in table {index}"
            raise InvalidPlan(text, field="page_tables.sub_pool")
        if sub_pool.kind is SubPoolKind.RECURRENT:
            raise UnsupportedFeature("recurrent sub-pools have no executor", field="page_tables.sub_pool")
        starts = _check_starts(plan, table, sub_pool=sub_pool)
        _check_coverage(plan, table, sub_pool=sub_pool, starts=starts)
        _check_writes(plan, table, sub_pool=sub_pool, counts=_check_indices(table, sub_pool))


def check_page_operations(plan: ForwardPlan, info: WorkerInfo) -> None:
    """Copies and clears name existing pages other than the sink."""
    operations = plan.page_operations
    if operations is None:
        return
    for column in columns.PAGE_OPERATIONS:
        check_length(f"page_operations.{column.name}", getattr(operations, column.name), expected=len(operations.kinds))
    check_range("page_operations.kinds", operations.kinds, low=COPY, high=ZERO)
    check_range("page_operations.orders", operations.orders, low=BEFORE, high=AFTER)
    check_range("page_operations.sub_pools", operations.sub_pools, low=0, high=len(info.sub_pools) - 1)
    last_pages = np.array([sub_pool.num_pages - 1 for sub_pool in info.sub_pools])[operations.sub_pools]
    copies = operations.kinds == COPY
    _check_operation("sources", operations.sources, low=copies.astype(np.int64), high=np.where(copies, last_pages, 0))
    _check_operation("targets", operations.targets, low=np.ones_like(last_pages), high=last_pages)
    same = np.flatnonzero(copies & (operations.sources == operations.targets))
    if len(same):
        text = f"page_operations.targets of operation {same[0]} is its source"
        raise InvalidPlan(text, field="page_operations.targets")


def _check_operation(name: str, pages: np.ndarray, *, low: np.ndarray, high: np.ndarray) -> None:
    bad = np.flatnonzero((pages < low) | (pages > high))
    if len(bad):
        index = int(bad[0])
        field = f"page_operations.{name}"
        text = f"{field} of operation {index} is {pages[index]}, allowed are {low[index]} to {high[index]}"
        raise InvalidPlan(text, field=field)


def _check_starts(plan: ForwardPlan, table: PageTable, *, sub_pool: SubPool) -> np.ndarray:
    """The first listed position of each row. [R] i64."""
    num_rows = plan.rows.num_rows
    starts = table.start_positions
    if starts is None:
        return np.zeros(num_rows, np.int64)
    field = "page_tables.start_positions"
    check_length(field, starts, expected=num_rows)
    starts = starts.astype(np.int64)
    first = plan.rows.first_positions.astype(np.int64)
    highest = np.zeros_like(first)
    if sub_pool.kind is SubPoolKind.WINDOW:
        highest = np.maximum(first - max(0, sub_pool.window_tokens - 1), 0)
    good = (starts >= 0) & (starts <= highest) & (starts % sub_pool.page_size == 0)
    if not good.all():
        row = int(np.argmin(good))
        expected = f"a multiple of {sub_pool.page_size} from 0 to {highest[row]} in sub-pool {table.sub_pool}"
        raise bad_value(field, starts[row].item(), expected=expected, row=row)
    return starts


def _check_coverage(plan: ForwardPlan, table: PageTable, *, sub_pool: SubPool, starts: np.ndarray) -> None:
    """Each row lists the pages of [start, seq_len), and its last page is used as far as the sequence goes."""
    num_rows = plan.rows.num_rows
    page_size = sub_pool.page_size
    seq_lens = plan.rows.seq_lens.astype(np.int64)
    check_indptr("page_tables.indptr", table.indptr, num_rows=num_rows)
    check_equal("page_tables.indptr", np.diff(table.indptr), expected=_page_counts(seq_lens - starts, page_size))
    check_length("page_tables.indices", table.indices, expected=int(table.indptr[-1]))
    check_length("page_tables.last_page_lens", table.last_page_lens, expected=num_rows)
    check_equal("page_tables.last_page_lens", table.last_page_lens, expected=(seq_lens - 1) % page_size + 1)


def _check_indices(table: PageTable, sub_pool: SubPool) -> np.ndarray:
    """Every page exists, is not the sink, and comes once in its row. Returns how often each page is listed."""
    indices, indptr = table.indices, table.indptr
    check_range("page_tables.indices", indices, low=1, high=sub_pool.num_pages - 1, indptr=indptr)
    counts = np.bincount(indices)
    if len(indices) and counts.max() > 1:
        shared = np.flatnonzero(counts[indices] > 1)
        rows = np.searchsorted(indptr, shared, side="right") - 1
        keys = rows * sub_pool.num_pages + indices[shared]
        order = np.argsort(keys, kind="stable")
        repeated = np.flatnonzero(np.diff(keys[order]) == 0)
        if len(repeated):
            index = int(shared[order[repeated[0] + 1]])
            row = csr_row(indptr, index)
            raise bad_value("page_tables.indices", indices[index].item(), expected="listed once in its row", row=row)
    return counts


def _check_writes(plan: ForwardPlan, table: PageTable, *, sub_pool: SubPool, counts: np.ndarray) -> None:
    """The written pages are those of [first_position, seq_len), and no other row lists any of them."""
    field = "page_tables.written_pages"
    page_size = sub_pool.page_size
    end_pages = _page_counts(plan.rows.seq_lens.astype(np.int64), page_size)
    written = end_pages - plan.rows.first_positions // page_size
    indptr = np.zeros(len(written) + 1, np.int64)
    np.cumsum(written, out=indptr[1:])
    check_length(field, table.written_pages, expected=int(indptr[-1]))
    into_indices = np.repeat(table.indptr[1:] - indptr[1:], written) + np.arange(indptr[-1])
    expected = table.indices[into_indices]
    wrong = np.flatnonzero(table.written_pages != expected)
    if len(wrong):
        index = int(wrong[0])
        row = csr_row(indptr, index)
        raise bad_value(field, table.written_pages[index].item(), expected=str(expected[index]), row=row)
    shared = np.flatnonzero(counts[expected] > 1)
    if len(shared):
        index = int(shared[0])
        row = csr_row(indptr, index)
        raise bad_value(field, expected[index].item(), expected="a page that no other row lists", row=row)


def _page_counts(num_tokens: np.ndarray, page_size: int) -> np.ndarray:
    return -(-num_tokens // page_size)
