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

from protos.wire.enums import ForwardMode
from worker_svc.attention.paged_rows import (
    MAX_GATHERED_SLOTS,
    FixedRows,
    PagedRows,
    first_slots,
    group_by_length,
    paged_rows,
    visible_slots,
)
from worker_svc.attention.row_tables import most_pages
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.batch.forward_mode import traits_of
from worker_svc.kv.token_to_kv_pool import TokenToKVPool

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeGroup:
    """Rows of one token each, gathered to one width. Tensors on the device."""

    kv: PagedRows | FixedRows
    tokens: Tensor
    """[n] int64"""
    hidden: Tensor
    """[n, 1, width] bool: slots at or past the row's length, or before its window."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExtendRow:
    """One row of several tokens."""

    kv: PagedRows
    first_token: int
    num_tokens: int
    num_slots: int
    visible: Tensor | None
    """[num_tokens, num_slots] bool, on the device. `None`: no prefix and no window, so the plain causal mask holds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchMetadata:
    """One step's plan. Lives until the step's forward is done."""

    out_cache_loc: Tensor
    decode: tuple[DecodeGroup, ...]
    extend: tuple[ExtendRow, ...]


class TorchFixedPlan:
    """See `FixedPlan`: rows of one token, all gathered to the width of the longest sequence."""

    def __init__(self, backend: "TorchAttention", batch: ForwardBatch, *, width: int) -> None:
        # Its rows have one token each, so the tokens' places stay as they are.
        self._rows = np.arange(batch.num_reqs)
        made = backend.decode_group(batch, self._rows, width=width, starts=self._rows)
        self._backend = backend
        self._width = width
        self._kv = FixedRows(
            pages=torch.empty_like(made.kv.pages),
            unused=torch.zeros((1, batch.num_reqs * width, 1), dtype=torch.bool, device=made.hidden.device),
            num_rows=batch.num_reqs,
            width=width,
        )
        self._group = DecodeGroup(kv=self._kv, tokens=made.tokens, hidden=torch.empty_like(made.hidden))
        slots = torch.zeros(batch.num_tokens, dtype=torch.int64, device=made.hidden.device)
        self.metadata = TorchMetadata(out_cache_loc=slots, decode=(self._group,), extend=())
        self.fill(batch)

    def fill(self, batch: ForwardBatch) -> None:
        """See `FixedPlan.fill`."""
        made = self._backend.decode_group(batch, self._rows, width=self._width, starts=self._rows)
        assert isinstance(made.kv, PagedRows)
        self._kv.fill(made.kv)
        self._group.hidden.copy_(made.hidden)
        group = batch.page_groups[self._backend.pool.geometry.sub_pool]
        self.metadata.out_cache_loc.copy_(group.out_cache_loc)


class TorchAttention:
    """The fast back-end."""

    parts = ()

    def __init__(self, pool: TokenToKVPool, *, context_tokens: int | None = None) -> None:
        """`context_tokens`: of the longest sequence, None if only the pool limits it."""
        self.pool = pool
        self._most_slots = most_pages(pool.geometry, context_tokens=context_tokens) * pool.geometry.page_size

    def plan(self, batch: ForwardBatch) -> TorchMetadata:
        """Sort the rows into decode groups and extend rows."""
        pages = batch.page_groups[self.pool.geometry.sub_pool]
        query_lens = batch.query_lens_host()
        starts = np.cumsum(query_lens) - query_lens
        unit = self.pool.geometry.page_size
        spans = batch.seq_lens_host - first_slots(pages, unit=unit)
        decode = [
            self.decode_group(batch, rows, width=width, starts=starts)
            for rows, width in group_by_length(np.flatnonzero(query_lens == 1), spans, unit=unit)
        ]
        extend = [self._extend_row(batch, int(row), start=int(starts[row])) for row in np.flatnonzero(query_lens > 1)]
        return TorchMetadata(out_cache_loc=pages.out_cache_loc, decode=tuple(decode), extend=tuple(extend))

    def why_not_fixed(self, mode: ForwardMode, *, max_reqs: int) -> str | None:
        """See `AttentionBackend.why_not_fixed`: every row would be gathered to the longest sequence's length."""
        if not traits_of(mode).is_decode_or_idle:
            return "torch attention computes rows of several tokens one by one"
        slots = max_reqs * self._most_slots
        if slots > MAX_GATHERED_SLOTS:
            most = f"at most {MAX_GATHERED_SLOTS} are"
            return f"torch attention would gather {slots} slots for {max_reqs} rows in every layer, {most}"
        return None

    def fixed_plan(self, batch: ForwardBatch) -> TorchFixedPlan:
        """See `AttentionBackend.fixed_plan`."""
        return TorchFixedPlan(self, batch, width=self._most_slots)

    def run(self, queries: Tensor, keys: Tensor, values: Tensor, *, layer: int, metadata: TorchMetadata) -> Tensor:
        """See `AttentionBackend.run`."""
        self.pool.write(layer, slots=metadata.out_cache_loc, keys=keys, values=values)
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for group in metadata.decode:
            output[group.tokens] = self._decode(queries, group, layer=layer).to(output.dtype)
        for row in metadata.extend:
            output[row.first_token : row.first_token + row.num_tokens] = self._extend(queries, row, layer=layer)
        return output.view(len(queries), -1)

    def decode_group(self, batch: ForwardBatch, rows: Array, *, width: int, starts: Array) -> DecodeGroup:
        """The plan of `rows` of the batch, of one token each, gathered to `width` slots.

        `starts`: of every row of the batch, where its first token stands.
        """
        kv = self._paged(batch, rows, width=width)
        device = kv.pages.device
        slots = (kv.firsts[:, None] + np.arange(width))[:, None]
        last = batch.seq_lens_host[rows].astype(np.int64)[:, None, None] - 1
        hidden = ~visible_slots(slots, last, window_tokens=self.pool.geometry.attention_window)
        return DecodeGroup(
            kv=kv,
            tokens=torch.from_numpy(starts[rows].astype(np.int64)).to(device),
            hidden=torch.from_numpy(hidden).to(device),
        )

    def _extend_row(self, batch: ForwardBatch, row: int, *, start: int) -> ExtendRow:
        geometry = self.pool.geometry
        seq_len, num_tokens = int(batch.seq_lens_host[row]), int(batch.query_lens_host()[row])
        first = int(batch.page_groups[geometry.sub_pool].start_positions_host[row])
        num_slots = seq_len - first
        kv = self._paged(batch, np.array([row]), width=-(-num_slots // geometry.page_size) * geometry.page_size)
        visible = None
        if num_tokens < seq_len or 0 < geometry.attention_window < seq_len:
            slots, positions = np.arange(first, seq_len), np.arange(seq_len - num_tokens, seq_len)[:, None]
            seen = visible_slots(slots, positions, window_tokens=geometry.attention_window)
            visible = torch.from_numpy(seen).to(kv.pages.device)
        return ExtendRow(kv=kv, first_token=start, num_tokens=num_tokens, num_slots=num_slots, visible=visible)

    def _paged(self, batch: ForwardBatch, rows: Array, *, width: int) -> PagedRows:
        geometry = self.pool.geometry
        pages = batch.page_groups[geometry.sub_pool]
        firsts = first_slots(pages, unit=geometry.page_size)
        return paged_rows(rows, pages, batch.seq_lens_host, firsts=firsts, width=width, pool=self.pool)

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
        keys = row.kv.gather(self.pool.keys(layer), queries.dtype)[:, 0, : row.num_slots]
        values = row.kv.gather(self.pool.values(layer), queries.dtype)[:, 0, : row.num_slots]
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
