"""Positions, start offsets and write slots of a forward's tokens. Pure NumPy, no tensors, no plan types.

Guards: the number of positions is the sum of the extend lengths, starts begin at 0, and a row's last position + 1 is
its length; chunking a prompt in any way gives the same positions.
"""

import numpy as np

Array = np.ndarray


def start_offsets(extend_lens: Array) -> Array:
    """[num_reqs] int32: index of each row's first token, the exclusive running sum."""
    starts: Array = np.cumsum(extend_lens, dtype=np.int64) - extend_lens
    return starts.astype(np.int32)


def token_rows(extend_lens: Array) -> Array:
    """[num_tokens] int64: the row of each token."""
    return np.repeat(np.arange(len(extend_lens), dtype=np.int64), extend_lens)


def extend_positions(prefix_lens: Array, extend_lens: Array) -> Array:
    """[num_tokens] int64: prefix .. prefix + n - 1 of each row, row after row."""
    row_shift = prefix_lens.astype(np.int64) - start_offsets(extend_lens)
    positions: Array = np.repeat(row_shift, extend_lens)
    positions += np.arange(len(positions), dtype=np.int64)
    return positions


def decode_positions(seq_lens: Array) -> Array:
    """[num_reqs] int64: position of the one token of each row; 0 for an empty sequence."""
    return np.maximum(seq_lens.astype(np.int64) - 1, 0)


def page_places(
    positions: Array, rows: Array, *, kv_indptr: Array, kv_indices: Array, start_positions: Array, page_size: int
) -> tuple[Array, Array]:
    """([num_tokens] page, [num_tokens] offset in it) that hold `positions` of `rows`; both int64."""
    relative = positions - start_positions[rows]
    page_index, offsets = np.divmod(relative, page_size)
    return kv_indices[kv_indptr[rows] + page_index].astype(np.int64), offsets
