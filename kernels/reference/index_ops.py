"""Positions, write slots, KV writes and token look-ups in plain torch, one row or token at a time."""

import torch
from torch import Tensor


def extend_positions(prefix_lens: Tensor, extend_lens: Tensor) -> Tensor:
    """[num_tokens] int64: prefix .. prefix + n - 1 of each row, row after row."""
    rows = zip(prefix_lens.tolist(), extend_lens.tolist(), strict=True)
    return torch.tensor([prefix + i for prefix, count in rows for i in range(count)], dtype=torch.int64)


def page_slots(positions: Tensor, rows: Tensor, *, table: tuple[Tensor, Tensor, Tensor], page_size: int) -> Tensor:
    """[num_tokens] int64: the slot that holds `positions` of `rows`.

    Args:
        positions: [num_tokens] int64.
        rows: [num_tokens] int64.
        table: kv_indptr [num_rows + 1], kv_indices, and start_positions [num_rows]: position of the first listed slot.
        page_size: tokens a page.
    """
    indptr, indices, starts = (part.tolist() for part in table)
    slots = []
    for position, row in zip(positions.tolist(), rows.tolist(), strict=True):
        page, offset = divmod(position - starts[row], page_size)
        slots.append(indices[indptr[row] + page] * page_size + offset)
    return torch.tensor(slots, dtype=torch.int64)


def write_kv(source: Tensor, slots: Tensor, target: Tensor) -> None:
    """Copy each token's heads into its slot; slots of page 0, the sink, are left as they are.

    Args:
        source: [num_tokens, num_kv_heads, head_dim].
        slots: [num_tokens] int64.
        target: [num_kv_heads, num_pages, page_size, head_dim], a view in any order; rounded to its type.
    """
    page_size = target.shape[2]
    for token, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, page_size)
        if page > 0:
            target[:, page, offset] = source[token].to(target.dtype)


def resolved_tokens(literals: Tensor, references: Tensor, sampled: Tensor) -> Tensor:
    """[num_tokens] int32: the literal, or where a reference is not -1 that entry of `sampled`."""
    pairs = zip(literals.tolist(), references.tolist(), strict=True)
    known = sampled.tolist()
    return torch.tensor([literal if at < 0 else known[at] for literal, at in pairs], dtype=torch.int32)
