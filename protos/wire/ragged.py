"""Rows of different lengths in flat arrays: spans, and tables made of the spans of two others.

Pure NumPy. A span is (start, length); `lens` are never negative.
"""

import numpy as np

Array = np.ndarray


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
    content[span_indexes(indptr[:-1], first_lens)] = first[span_indexes(first_starts, first_lens)]
    content[span_indexes(indptr[:-1] + first_lens, second_lens)] = second
    return indptr, content
