"""Which columns a delta leaves to its base, and their rows put together. Part of `delta`.

A row of a delta either goes on from a row of the base, or is in full. Soft columns are taken from the base's row; a
delta holds them for rows in full only. All others are in the delta for every row, or follow from the others.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from protos.wire import columns
from protos.wire.enums import HiddenMode
from protos.wire.errors import InvalidPlan
from protos.wire.plan import ForwardPlan
from protos.wire.ragged import indptr_of, span_indexes

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class SoftColumn:
    """One value a row."""

    group: str
    name: str
    dtype: np.dtype[Any]
    neutral: float
    """What an absent column says."""
    optional: bool = True

    @property
    def path(self) -> str:
        """How errors name it."""
        return f"{self.group}.{self.name}"


@dataclass(frozen=True, slots=True)
class SoftTable:
    """A CSR table of a group; `indptr` is u32."""

    group: str
    indptr: str
    contents: tuple[tuple[str, np.dtype[Any]], ...]
    optional: bool


SOFT_COLUMNS = (
    SoftColumn("rows", "handles", columns.U64, 0, optional=False),
    SoftColumn("rows", "attempts", columns.U32, 0, optional=False),
    SoftColumn("rows", "sample_indices", columns.U32, 0),
    SoftColumn("rows", "dp_ranks", columns.U32, 0),
    SoftColumn("rows", "hidden_modes", columns.U8, HiddenMode.NULL),
    SoftColumn("rows", "canary_seeds", columns.U64, 0),
    SoftColumn("sampling", "temperatures", columns.F32, 0),
    SoftColumn("sampling", "top_ks", columns.U32, 0),
    SoftColumn("sampling", "top_ps", columns.F32, 1),
    SoftColumn("sampling", "min_ps", columns.F32, 0),
    SoftColumn("sampling", "seeds", columns.U64, 0),
    SoftColumn("penalties", "repetition", columns.F32, 1, optional=False),
    SoftColumn("penalties", "frequency", columns.F32, 0, optional=False),
    SoftColumn("penalties", "presence", columns.F32, 0, optional=False),
)
SOFT_TABLES = (
    SoftTable("sampling", "bias_indptr", (("bias_ids", columns.U32), ("bias_values", columns.F32)), optional=True),
    SoftTable("penalties", "prompt_indptr", (("prompt_ids", columns.U32),), optional=False),
)
FRESH_COLUMNS = ("seq_lens", "extend_lens", "samples")
OPTIONAL_FRESH_COLUMNS = ("canary_hashes",)
"""Of the rows: in a delta for every row, if the plan has them. `first_positions` follows from the first two."""
PRESENCE = (
    "sampling",
    "penalties",
    *(column.path for column in SOFT_COLUMNS if column.optional),
    *(f"{table.group}.{table.indptr}" for table in SOFT_TABLES if table.optional),
)
"""Optional groups and soft columns, by number: a delta says which of them its plan has. Append only."""


@dataclass(frozen=True, slots=True)
class RowSources:
    """Where the R rows of a plan come from."""

    kept: Array
    """[k] int64: rows that go on from a base row."""
    base: Array
    """[k] int64: those base rows."""
    full: Array
    """[R - k] int64: rows in full."""
    num_rows: int
    """R"""


def row_sources(base_rows: Array, *, num_base_rows: int) -> RowSources:
    """Of the column `base_rows`.

    Raises:
        InvalidPlan: a base row does not exist or is named twice.
    """
    kept = np.flatnonzero(base_rows)
    base = base_rows[kept].astype(np.int64) - 1
    if len(base) and (int(base.max()) >= num_base_rows or len(np.unique(base)) < len(base)):
        text = f"delta.base_rows names a row twice, or one beyond the base's {num_base_rows}"
        raise InvalidPlan(text, field="delta.base_rows")
    return RowSources(kept, base, np.flatnonzero(base_rows == 0), len(base_rows))


def present_names(plan: ForwardPlan) -> list[str]:
    """Which of `PRESENCE` the plan has."""
    return [name for name in PRESENCE if _read(plan, name) is not None]


def soft_table(plan: ForwardPlan, table: SoftTable) -> dict[str, Array] | None:
    """`indptr` and contents of the plan; None if the plan lacks them."""
    names = (table.indptr, *(name for name, _ in table.contents))
    if _read(plan, f"{table.group}.{table.indptr}") is None:
        return None
    return {name: _read(plan, f"{table.group}.{name}") for name in names}


def soft_values(plan: ForwardPlan, column: SoftColumn) -> Array | None:
    """The column of the plan; None if the plan or its group lacks it."""
    found: Array | None = _read(plan, column.path)
    return found


def merged_column(column: SoftColumn, base: ForwardPlan, delta: ForwardPlan, sources: RowSources) -> Array:
    """The column of all rows: of the base, or neutral where it has none, and of the delta.

    Raises:
        InvalidPlan: the delta's part has another length than it has rows in full.
    """
    merged = np.full(sources.num_rows, column.neutral, column.dtype)
    of_base = soft_values(base, column)
    if of_base is not None:
        merged[sources.kept] = of_base[sources.base]
    merged[sources.full] = checked(column.path, soft_values(delta, column), length=len(sources.full))
    return merged


def merged_table(table: SoftTable, base: ForwardPlan, delta: ForwardPlan, sources: RowSources) -> dict[str, Array]:
    """`indptr` and contents of all rows, likewise.

    Raises:
        InvalidPlan: the delta's part is no table over its rows in full.
    """
    path = f"{table.group}.{table.indptr}"
    base_indptr = _read(base, path)
    if base_indptr is None:
        base_indptr = np.zeros(base.rows.num_rows + 1, np.int64)
    full_indptr = checked_indptr(path, _read(delta, path), num_rows=len(sources.full))
    base_starts, kept_lens = base_indptr[:-1][sources.base].astype(np.int64), np.diff(base_indptr)[sources.base]
    lens = np.zeros(sources.num_rows, np.int64)
    lens[sources.kept], lens[sources.full] = kept_lens, np.diff(full_indptr)
    indptr = indptr_of(lens, columns.U32)
    merged = {table.indptr: indptr}
    for name, dtype in table.contents:
        content = np.empty(int(indptr[-1]), dtype)
        of_base, of_delta = _read(base, f"{table.group}.{name}"), _read(delta, f"{table.group}.{name}")
        if of_base is not None:
            into = span_indexes(indptr[:-1][sources.kept], kept_lens)
            content[into] = of_base[span_indexes(base_starts, kept_lens)]
        into = span_indexes(indptr[:-1][sources.full], lens[sources.full])
        content[into] = checked(f"{table.group}.{name}", of_delta, length=int(full_indptr[-1]))
        merged[name] = content
    return merged


def checked(path: str, values: Array | None, *, length: int) -> Array:
    """`values`, of that length; None counts as empty.

    Raises:
        InvalidPlan: another length.
    """
    found = 0 if values is None else len(values)
    if found != length:
        raise InvalidPlan(f"{path} of a delta has {found} elements, expected {length}", field=path)
    return np.empty(0, np.int64) if values is None else values


def checked_indptr(path: str, indptr: Array | None, *, num_rows: int) -> Array:
    """[num_rows + 1] int64, rising from 0; None or empty: every row is empty.

    Raises:
        InvalidPlan: anything else.
    """
    if indptr is None or not len(indptr):
        return np.zeros(num_rows + 1, np.int64)
    wide = checked(path, indptr, length=num_rows + 1).astype(np.int64)
    if wide[0] != 0 or (np.diff(wide) < 0).any():
        raise InvalidPlan(f"{path} of a delta does not rise from 0", field=path)
    return wide


def _read(plan: ForwardPlan, path: str) -> Any:
    found: Any = plan
    for name in path.split("."):
        found = None if found is None else getattr(found, name)
    return found
