"""Rows of different lengths in flat arrays: spans, and tables made of the spans of two others.

Pure NumPy. A span is (start, length); `lens` are never negative.
"""

from itertools import pairwise

import numpy as np

Array = np.ndarray

_MOST_RUNS = 64
"""Rows that follow each other in memory are one run: while runs are few, they are cheaper than elements."""


def span_indexes(starts: Array, lens: Array) -> Array:
    """[sum(lens)] int64: starts[r] .. starts[r] + lens[r] - 1 of each row, row after row."""
    lens = lens.astype(np.int64)
    ends = np.cumsum(lens)
    indexes: Array = np.repeat(starts.astype(np.int64) - (ends - lens), lens)
    indexes += np.arange(len(indexes))
    return indexes


def indptr_of(lens: Array, dtype: np.dtype) -> Array:
    """[R + 1]: 0, then the running sum."""
    indptr = np.zeros(len(lens) + 1, dtype)
    np.cumsum(lens, out=indptr[1:])
    return indptr


def same_spans(one: Array, one_starts: Array, other: Array, other_starts: Array, *, lens: Array) -> Array:
    """[R] bool: whether `lens[r]` elements from the two starts of the row are equal."""
    runs = _runs(one_starts, other_starts, lens)
    if len(runs) > _MOST_RUNS:
        return _same_elements(one, one_starts, other, other_starts, lens=lens)
    same = np.ones(len(lens), bool)
    bounds = [*runs.tolist(), len(lens)]
    for begin, end in pairwise(bounds):
        size = int(lens[begin:end].sum())
        first, second = int(one_starts[begin]), int(other_starts[begin])
        if not np.array_equal(one[first : first + size], other[second : second + size]):
            rows = slice(begin, end)
            same[rows] = _same_elements(one, one_starts[rows], other, other_starts[rows], lens=lens[rows])
    return same


def _runs(one_starts: Array, other_starts: Array, lens: Array) -> Array:
    """Rows at which one of the two does not go on where the row before ended; the first row is one."""
    if not len(lens):
        return np.zeros(0, np.int64)
    is_new = np.ones(len(lens), bool)
    is_new[1:] = (one_starts[1:] != one_starts[:-1] + lens[:-1]) | (other_starts[1:] != other_starts[:-1] + lens[:-1])
    return np.flatnonzero(is_new)


def _same_elements(one: Array, one_starts: Array, other: Array, other_starts: Array, *, lens: Array) -> Array:
    differs = one[span_indexes(one_starts, lens)] != other[span_indexes(other_starts, lens)]
    same = np.ones(len(lens), bool)
    same[np.repeat(np.arange(len(lens)), lens)[differs]] = False
    return same


def joined_spans(
    first: Array, first_starts: Array, first_lens: Array, *, second: Array, second_lens: Array
) -> tuple[Array, Array]:
    """(indptr, content) of rows that are a span of `first`, then the next `second_lens[r]` elements of `second`."""
    indptr = indptr_of(first_lens + second_lens, np.dtype(np.int64))
    content = np.empty(int(indptr[-1]), first.dtype)
    runs = _runs(first_starts, indptr[:-1], first_lens)
    if len(runs) <= _MOST_RUNS:
        for begin, end in pairwise([*runs.tolist(), len(first_lens)]):
            size = int(first_lens[begin:end].sum())
            start, place = int(first_starts[begin]), int(indptr[begin])
            content[place : place + size] = first[start : start + size]
    else:
        content[span_indexes(indptr[:-1], first_lens)] = first[span_indexes(first_starts, first_lens)]
    content[span_indexes(indptr[:-1] + first_lens, second_lens)] = second
    return indptr, content
