"""Vectorised checks of one column, shared by the invariants of `validate`.

Each raises with the column, the first bad row, its value and the limit, and costs a few microseconds when all is well.
"""

import numpy as np

from protos.wire.errors import InvalidPlan


def check_length(field: str, array: np.ndarray | None, *, expected: int) -> None:
    """A present column has `expected` elements."""
    if array is not None and len(array) != expected:
        raise InvalidPlan(f"{field} has {len(array)} elements, expected {expected}", field=field)


def check_present(field: str, array: np.ndarray | None) -> np.ndarray:
    """The column, which must be present."""
    if array is None:
        raise InvalidPlan(f"{field} is absent", field=field)
    return array


def check_absent(field: str, array: np.ndarray | None, *, without: str) -> None:
    """A column that has no meaning without another is absent."""
    if array is not None:
        raise InvalidPlan(f"{field} is present without {without}", field=field)


def check_each(field: str, values: np.ndarray, *, good: np.ndarray, expected: str) -> None:
    """Every row is `good`; `values` are what the message shows of the first that is not."""
    if not good.all():
        row = int(np.argmin(good))
        raise bad_value(field, values[row].item(), expected=expected, row=row)


def check_equal(field: str, values: np.ndarray, *, expected: np.ndarray) -> None:
    """Every row has the expected value."""
    good = values == expected
    if not good.all():
        row = int(np.argmin(good))
        raise bad_value(field, values[row].item(), expected=str(expected[row].item()), row=row)


def check_range(
    field: str, values: np.ndarray | None, *, low: float, high: float, indptr: np.ndarray | None = None
) -> None:
    """Every element of a present column is in [low, high]. NaN is not.

    Args:
        field: the column's name.
        values: one element a row, or a CSR table's content.
        low: lowest allowed value.
        high: highest allowed value.
        indptr: of the CSR table, to name the row.
    """
    if values is None or not len(values) or (values.min() >= low and values.max() <= high):
        return
    index = int(np.argmin((values >= low) & (values <= high)))
    row = index if indptr is None else csr_row(indptr, index)
    raise bad_value(field, values[index].item(), expected=f"{low} to {high}", row=row)


def check_indptr(field: str, indptr: np.ndarray, *, num_rows: int) -> None:
    """A running sum: one more element than rows, from 0, never falling."""
    check_length(field, indptr, expected=num_rows + 1)
    if indptr[0] != 0:
        raise InvalidPlan(f"{field} starts at {indptr[0].item()}, not 0", field=field)
    check_each(field, indptr[1:], good=indptr[1:] >= indptr[:-1], expected="no less than the element before it")


def check_distinct(field: str, ids: np.ndarray, *, indptr: np.ndarray) -> None:
    """No id twice within one row of a CSR table. `ids` are not negative."""
    if len(ids) < 2:
        return
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr).astype(np.int64))
    stride = int(ids.max()) + 1
    keys = np.sort(rows * stride + ids)
    repeated = np.flatnonzero(keys[1:] == keys[:-1])
    if len(repeated):
        row, value = divmod(keys[repeated[0]].item(), stride)
        raise bad_value(field, value, expected="distinct within the row", row=row)


def csr_row(indptr: np.ndarray, index: int) -> int:
    """The row that holds element `index` of a CSR table."""
    return int(np.searchsorted(indptr, index, side="right")) - 1


def bad_value(field: str, value: float, *, expected: str, row: int) -> InvalidPlan:
    """The error for one bad element."""
    return InvalidPlan(f"{field} of row {row} is {value}, expected {expected}", field=field, rows=(row,))
