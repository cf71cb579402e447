"""Attention on GPUs with flashinfer's paged wrappers: pages are read in place, planned once per step.

Written against flashinfer 0.6.18; `tests/contract` holds its signatures. Knows nothing of how the package is found.
Guards: steps that the wrappers plan and run are the same step, and rows without tokens are not shown to them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from protos.wire.errors import InternalFault
from worker_svc.attention.base import with_padding
from worker_svc.attention.row_tables import RowTable, row_table
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.kv.kv_order import KVOrder
from worker_svc.kv.token_to_kv_pool import TokenToKVPool

WORKSPACE_BYTES = 128 << 20
"""Partial results of rows that are shared out; lent to one wrapper at a time."""
KERNELS = "fa2"
"""Its loads fill values past a row's length with zeros, so that NaN there cannot spread. `auto` may choose others."""
PLAIN_SHARES = frozenset({1, 2, 3})
"""Query heads per KV head for which the decode kernel without tensor cores exists and is the faster one."""
_LAYOUTS: Mapping[KVOrder, str] = MappingProxyType({KVOrder.NHD: "NHD", KVOrder.HND: "HND"})


class PagedWrapper(Protocol):
    """What is used of flashinfer's wrappers."""

    def plan(self, *arguments: Any, **options: Any) -> None:
        """Prepare one step."""
        ...

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        """[num_tokens, num_q_heads, head_dim], owned."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInfer:
    """The classes of the package."""

    prefill_wrapper: Callable[..., PagedWrapper]
    """BatchPrefillWithPagedKVCacheWrapper"""
    decode_wrapper: Callable[..., PagedWrapper]
    """BatchDecodeWithPagedKVCacheWrapper"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashInferMetadata:
    """One step's plan. Lives until the step's forward is done."""

    out_cache_loc: Tensor
    num_tokens: int
    """Padding tokens left out: the wrapper takes as many queries as its rows have tokens."""
    wrapper: PagedWrapper
    number: int
    """Which plan of this back-end it is: a wrapper holds one at a time."""


class FlashInferAttention:
    """The back-end for GPUs. Owns a workspace and two wrappers for the process's life."""

    parts = ()

    def __init__(self, pool: TokenToKVPool, library: FlashInfer, *, num_q_heads: int, dtype: torch.dtype) -> None:
        self.pool = pool
        self._num_q_heads = num_q_heads
        self._dtype = dtype
        self._number = 0
        layout, device = _LAYOUTS[pool.geometry.order], pool.pages(0).device
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        share = num_q_heads // pool.geometry.num_kv_heads
        self._prefill = library.prefill_wrapper(workspace, layout, backend=KERNELS)
        self._decode = library.decode_wrapper(
            workspace, layout, use_tensor_cores=share not in PLAIN_SHARES, backend=KERNELS
        )

    def plan(self, batch: ForwardBatch) -> FlashInferMetadata:
        """Let the wrapper of the batch's kind plan it. Tables go from the host, so that nothing waits for the GPU."""
        group = batch.page_groups[self.pool.geometry.sub_pool]
        table = row_table(group, query_lens=batch.query_lens_host(), seq_lens=batch.seq_lens_host)
        self._number += 1
        wrapper = self._plan_decode(table) if batch.extend is None else self._plan_extend(table)
        return FlashInferMetadata(
            out_cache_loc=group.out_cache_loc, num_tokens=table.num_tokens, wrapper=wrapper, number=self._number
        )

    def run(self, queries: Tensor, keys: Tensor, values: Tensor, *, layer: int, metadata: FlashInferMetadata) -> Tensor:
        """See `AttentionBackend.run`.

        Raises:
            InternalFault: another step was planned since.
        """
        if metadata.number != self._number:
            raise InternalFault("flashinfer attention was planned for another step since")
        self.pool.write(layer, slots=metadata.out_cache_loc, keys=keys, values=values)
        output = metadata.wrapper.run(queries[: metadata.num_tokens].contiguous(), self.pool.pages(layer))
        return with_padding(output.view(metadata.num_tokens, -1), num_tokens=len(queries))

    def _plan_decode(self, table: RowTable) -> PagedWrapper:
        self._decode.plan(
            _on_host(table.kv_indptr),
            _on_host(table.kv_indices),
            _on_host(table.last_page_lens(self.pool.geometry.page_size)),
            self._num_q_heads,
            self.pool.geometry.num_kv_heads,
            self.pool.geometry.head_dim,
            self.pool.geometry.page_size,
            **self._options(),
        )
        return self._decode

    def _plan_extend(self, table: RowTable) -> PagedWrapper:
        self._prefill.plan(
            _on_host(table.qo_indptr),
            _on_host(table.kv_indptr),
            _on_host(table.kv_indices),
            _on_host(table.last_page_lens(self.pool.geometry.page_size)),
            self._num_q_heads,
            self.pool.geometry.num_kv_heads,
            self.pool.geometry.head_dim,
            self.pool.geometry.page_size,
            causal=True,
            **self._options(),
        )
        return self._prefill

    def _options(self) -> dict[str, Any]:
        return {
            "window_left": self.pool.geometry.attention_window - 1,  # tokens before the query's own; -1: all
            "q_data_type": self._dtype,
            "kv_data_type": self.pool.geometry.dtype,
            "sm_scale": self.pool.geometry.head_dim**-0.5,
        }


def _on_host(values: np.ndarray) -> Tensor:
    """An int32 tensor of its own: batches' arrays are read-only, which torch does not know."""
    return torch.from_numpy(np.array(values, np.int32))
