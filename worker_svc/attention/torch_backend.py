"""Attention with torch's own operators: fast, and equal to the tiled back-end within rounding.

Rows of one token run as one batched product per length class; rows of several tokens run through torch's fused
attention, row by row. Works on the CPU and on GPUs.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from worker_svc.attention.paged_rows import PagedRows, group_by_length, paged_rows
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.kv.token_to_kv_pool import TokenToKVPool

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeGroup:
    """Rows of one token each, gathered to one width. Tensors on the device."""

    kv: PagedRows
    tokens: Tensor
    """[n] int64"""
    hidden: Tensor
    """[n, 1, width] bool: slots at or past the row's length."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExtendRow:
    """One row of several tokens."""

    kv: PagedRows
    first_token: int
    num_tokens: int
    seq_len: int
    visible: Tensor | None
    """[num_tokens, seq_len] bool, on the device. `None`: the row has no prefix, so the plain causal mask holds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchMetadata:
    """One step's plan. Lives until the step's forward is done."""

    out_cache_loc: Tensor
    decode: tuple[DecodeGroup, ...]
    extend: tuple[ExtendRow, ...]


class TorchAttention:
    """The fast back-end."""

    parts = ()

    def __init__(self, pool: TokenToKVPool) -> None:
        self.pool = pool

    def plan(self, batch: ForwardBatch) -> TorchMetadata:
        """Sort the rows into decode groups and extend rows."""
        (pages,) = batch.page_groups
        assert not pages.start_positions_host.any(), "rows of a full-attention sub-pool start at position 0"
        query_lens = batch.query_lens_host()
        starts = np.cumsum(query_lens) - query_lens
        decode = [
            self._decode_group(batch, rows, width=width, starts=starts)
            for rows, width in group_by_length(
                np.flatnonzero(query_lens == 1), batch.seq_lens_host, unit=self.pool.geometry.page_size
            )
        ]
        extend = [self._extend_row(batch, int(row), start=int(starts[row])) for row in np.flatnonzero(query_lens > 1)]
        return TorchMetadata(out_cache_loc=pages.out_cache_loc, decode=tuple(decode), extend=tuple(extend))

    def run(self, queries: Tensor, keys: Tensor, values: Tensor, *, layer: int, metadata: TorchMetadata) -> Tensor:
        """See `AttentionBackend.run`."""
        self.pool.write(layer, slots=metadata.out_cache_loc, keys=keys, values=values)
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for group in metadata.decode:
            output[group.tokens] = self._decode(queries, group, layer=layer).to(output.dtype)
        for row in metadata.extend:
            output[row.first_token : row.first_token + row.num_tokens] = self._extend(queries, row, layer=layer)
        return output.view(len(queries), -1)

    def _decode_group(self, batch: ForwardBatch, rows: Array, *, width: int, starts: Array) -> DecodeGroup:
        (pages,) = batch.page_groups
        device = pages.out_cache_loc.device
        hidden = np.arange(width) >= batch.seq_lens_host[rows][:, None, None]
        return DecodeGroup(
            kv=paged_rows(rows, pages, batch.seq_lens_host, width=width, pool=self.pool),
            tokens=torch.from_numpy(starts[rows].astype(np.int64)).to(device),
            hidden=torch.from_numpy(hidden).to(device),
        )

    def _extend_row(self, batch: ForwardBatch, row: int, *, start: int) -> ExtendRow:
        (pages,) = batch.page_groups
        page_size = self.pool.geometry.page_size
        seq_len, num_tokens = int(batch.seq_lens_host[row]), int(batch.query_lens_host()[row])
        width = -(-seq_len // page_size) * page_size
        visible = None
        if num_tokens < seq_len:
            positions = np.arange(seq_len - num_tokens, seq_len)
            visible = torch.from_numpy(np.arange(seq_len) <= positions[:, None]).to(pages.out_cache_loc.device)
        return ExtendRow(
            kv=paged_rows(np.array([row]), pages, batch.seq_lens_host, width=width, pool=self.pool),
            first_token=start,
            num_tokens=num_tokens,
            seq_len=seq_len,
            visible=visible,
        )

    def _decode(self, queries: Tensor, group: DecodeGroup, *, layer: int) -> Tensor:
        """[n, num_q_heads, head_dim] float32: scores of 10 and more do not bear bfloat16's 8 bits."""
        heads, head_dim = self.pool.geometry.num_kv_heads, self.pool.geometry.head_dim
        count, share = len(group.tokens), queries.shape[1] // heads
        keys = group.kv.gather(self.pool.keys(layer), torch.float32).view(heads * count, -1, head_dim)
        values = group.kv.gather(self.pool.values(layer), torch.float32).view(heads * count, -1, head_dim)
        query = queries.index_select(0, group.tokens).float().view(count, heads, share, head_dim).transpose(0, 1)
        query = query.reshape(heads * count, share, head_dim) * head_dim**-0.5
        scores = torch.bmm(query, keys.transpose(1, 2))
        scores.view(heads, count, share, -1).masked_fill_(group.hidden, -math.inf)
        output = torch.bmm(torch.softmax(scores, -1), values).view(heads, count, share, head_dim)
        return output.transpose(0, 1).reshape(count, heads * share, head_dim)

    def _extend(self, queries: Tensor, row: ExtendRow, *, layer: int) -> Tensor:
        """[num_tokens, num_q_heads, head_dim]."""
        keys = row.kv.gather(self.pool.keys(layer), queries.dtype)[:, 0, : row.seq_len]
        values = row.kv.gather(self.pool.values(layer), queries.dtype)[:, 0, : row.seq_len]
        query = queries[row.first_token : row.first_token + row.num_tokens].transpose(0, 1)
        output = functional.scaled_dot_product_attention(
            query[None],
            keys[None],
            values[None],
            attn_mask=row.visible,
            is_causal=row.visible is None,
            enable_gqa=True,
        )
        return output[0].transpose(0, 1)
