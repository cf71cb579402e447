"""Paged attention, one token and head at a time, in plain torch."""

import numpy as np
import torch
from torch import Tensor

from kernels.native_ops import PagedRowTable

PAGE = 16


def paged_attention(queries: Tensor, kv: Tensor, *, table: PagedRowTable, scale: float, window: int = 0) -> Tensor:
    """As `kernels.native_ops.paged_attention`, in float64 over the values that the pages hold."""
    out = torch.zeros_like(queries)
    group = queries.shape[1] // kv.shape[1]
    for row, length in enumerate(table.seq_lens.tolist()):
        begin, end = table.qo_indptr[row], table.qo_indptr[row + 1]
        keys, values, start = _row(kv, table, row)
        for token in range(begin, end):
            position = length - (end - token)
            first = max(0, position + 1 - window) if window else 0
            chosen = slice(first - start, position + 1 - start)
            for head in range(queries.shape[1]):
                scores = keys[head // group, chosen] @ queries[token, head].double() * scale
                out[token, head] = (torch.softmax(scores, 0) @ values[head // group, chosen]).float()
    return out


def _row(kv: Tensor, table: PagedRowTable, row: int) -> tuple[Tensor, Tensor, int]:
    """Keys and values of one row, [num_kv_heads, slots, head_dim], and the position of the first slot."""
    pages = table.pages
    listed = torch.from_numpy(pages.kv_indices[pages.kv_indptr[row] : pages.kv_indptr[row + 1]].astype(np.int64))
    mine = kv[listed].double()
    keys = mine[:, :, 0].unflatten(-1, (-1, PAGE)).permute(1, 0, 3, 2).flatten(1, 2)
    values = mine[:, :, 1].unflatten(-1, (PAGE, -1)).permute(1, 0, 2, 3).flatten(1, 2)
    return keys, values, 0 if pages.start_positions is None else int(pages.start_positions[row])
