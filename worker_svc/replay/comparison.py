"""Whether two results of one plan say the same; if not, the first row and field that differ. Pure."""

from dataclasses import dataclass

import numpy as np

from protos.wire.result import ForwardResult, ResultColumns, ResultLogprobs

Array = np.ndarray

_ROW_FIELDS = ("handles", "attempts", "positions", "statuses", "token_ids", "failures")
_TOP_FIELDS = ("output_top_ids", "output_top_values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first one of a plan."""

    seq: int
    row: int
    handle: int
    field: str
    expected: str
    """Recorded."""
    got: str


def first_difference(recorded: ForwardResult, got: ForwardResult, *, logprob_tolerance: float) -> Difference | None:
    """The first row whose token, status, failure or log-probability differs; None if none does.

    Args:
        recorded: what the file holds.
        got: what this executor gave.
        logprob_tolerance: most that a log-probability may differ.
    """
    if recorded.rows is None or got.rows is None:
        return _whole(recorded, got)
    found: list[Difference] = []
    for name in _ROW_FIELDS:
        expected, actual = (_column(rows, name) for rows in (recorded.rows, got.rows))
        if len(expected) != len(actual):
            return _difference(recorded, 0, f"rows.{name}", expected=len(expected), got=len(actual))
        for row in np.flatnonzero(expected != actual)[:1].tolist():
            found.append(_difference(recorded, row, f"rows.{name}", expected=expected[row], got=actual[row]))
    found += _logprob_differences(recorded, got, tolerance=logprob_tolerance)
    return min(found, key=lambda difference: difference.row, default=None)


def _logprob_differences(recorded: ForwardResult, got: ForwardResult, *, tolerance: float) -> list[Difference]:
    expected, actual = recorded.logprobs or ResultLogprobs(), got.logprobs or ResultLogprobs()
    found = []
    if expected.output is not None:
        values = _sized(actual.output, len(expected.output))
        for row in np.flatnonzero(~(np.abs(expected.output - values) <= tolerance))[:1].tolist():
            found.append(_difference(recorded, row, "logprobs.output", expected=expected.output[row], got=values[row]))
    bounds = expected.output_top_indptr
    if bounds is None or expected.output_top_ids is None or expected.output_top_values is None:
        return found
    ids = _sized(actual.output_top_ids, len(expected.output_top_ids))
    values = _sized(actual.output_top_values, len(expected.output_top_values))
    near = np.abs(expected.output_top_values - values) <= tolerance
    # Two ids of nearly the same value may change places.
    wrong = np.flatnonzero(~near | ((ids != expected.output_top_ids) & (tolerance == 0)))
    for place in wrong[:1].tolist():
        row = int(np.searchsorted(bounds, place, side="right")) - 1
        shown = [f"{int(id_)}:{float(value):.6f}" for id_, value in _pairs(expected, ids, values, place)]
        found.append(_difference(recorded, row, "logprobs.output_top", expected=shown[0], got=shown[1]))
    return found


def _pairs(expected: ResultLogprobs, ids: Array, values: Array, place: int) -> tuple[tuple[float, float], ...]:
    assert expected.output_top_ids is not None
    assert expected.output_top_values is not None
    return (expected.output_top_ids[place], expected.output_top_values[place]), (ids[place], values[place])


def _whole(recorded: ForwardResult, got: ForwardResult) -> Difference | None:
    """One of them is a rejection."""
    if (recorded.rows is None) == (got.rows is None):
        return None
    expected, actual = ("rejected" if result.rows is None else "rows" for result in (recorded, got))
    return Difference(seq=recorded.identity.seq, row=0, handle=0, field="rejection", expected=expected, got=actual)


def _difference(recorded: ForwardResult, row: int, field: str, *, expected: object, got: object) -> Difference:
    handles = recorded.rows.handles if recorded.rows is not None else ()
    handle = int(handles[row]) if row < len(handles) else 0
    return Difference(
        seq=recorded.identity.seq, row=row, handle=handle, field=field, expected=str(expected), got=str(got)
    )


def _column(rows: ResultColumns, name: str) -> Array:
    column: Array | None = getattr(rows, name)
    return np.zeros(rows.handles.shape, np.uint8) if column is None else column


def _sized(column: Array | None, size: int) -> Array:
    """The column, or as many NaN when it has another size: they equal nothing."""
    if column is None or len(column) != size:
        return np.full(size, np.nan)
    return column
