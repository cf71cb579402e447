"""Attention on GPUs with flashinfer's paged wrappers: pages are read in place, planned once per step.

Written against flashinfer 0.6.18; `tests/contract` holds its signatures. Knows nothing of how the package is found.
Guards: steps that the wrappers plan and run are the same step, and rows without tokens are not shown to them.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protos.wire.enums import ForwardMode
from protos.wire.errors import InternalFault
from worker_svc.attention.base import with_padding
from worker_svc.attention.flashinfer_fixed import FixedTables, FlashInferFixedPlan
from worker_svc.attention.flashinfer_wrappers import FlashInfer, FlashInferMetadata, PagedWrapper
from worker_svc.attention.row_tables import RowTable, most_pages, row_table, sink_table, whole_table
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.device.device_graph import CaptureError
from worker_svc.kv.kv_order import KVOrder
from worker_svc.kv.token_to_kv_pool import TokenToKVPool

WORKSPACE_BYTES = 128 << 20
"""Partial results of rows that are shared out; lent to one wrapper at a time."""
KERNELS = "fa2"
"""Its loads fill values past a row's length with zeros, so that NaN there cannot spread. `auto` may choose others."""
PLAIN_SHARES = frozenset({1, 2, 3})
"""Query heads per KV head for which the decode kernel without tensor cores exists and is the faster one."""
_LAYOUTS: Mapping[KVOrder, str] = MappingProxyType({KVOrder.NHD: "NHD", KVOrder.HND: "HND"})


class FlashInferAttention:
    """The back-end for GPUs. Owns a workspace, two wrappers for the process's life, one for each graph's shape."""

    parts = ()

    def __init__(
        self,
        pool: TokenToKVPool,
        library: FlashInfer,
        *,
        num_q_heads: int,
        dtype: torch.dtype,
        context_tokens: int | None = None,
    ) -> None:
        """`context_tokens`: of the longest sequence, None if only the pool limits it."""
        self.pool = pool
        self._num_q_heads = num_q_heads
        self._dtype = dtype
        self._number = 0
        self._most_pages = most_pages(pool.geometry, context_tokens=context_tokens)
        layout, device = _LAYOUTS[pool.geometry.order], pool.pages(0).device
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        share = num_q_heads // pool.geometry.num_kv_heads
        self._new_prefill = partial(library.prefill_wrapper, workspace, layout, backend=KERNELS)
        self._new_decode = partial(
            library.decode_wrapper, workspace, layout, use_tensor_cores=share not in PLAIN_SHARES, backend=KERNELS
        )
        self._prefill, self._decode = self._new_prefill(), self._new_decode()
        self._fixed = FixedTables(workspace, most_pages=self._most_pages)

    def plan(self, batch: ForwardBatch) -> FlashInferMetadata:
        """Let the wrapper of the batch's kind plan it. Tables go from the host, so that nothing waits for the GPU."""
        group = batch.page_groups[self.pool.geometry.sub_pool]
        table = row_table(group, query_lens=batch.query_lens_host(), seq_lens=batch.seq_lens_host)
        self._number += 1
        wrapper = self._decode if batch.extend is None else self._prefill
        (self._plan_decode if batch.extend is None else self._plan_extend)(wrapper, table)
        return FlashInferMetadata(
            out_cache_loc=group.out_cache_loc, num_tokens=table.num_tokens, wrapper=wrapper, number=self._number
        )

    def why_not_fixed(self, mode: ForwardMode, *, max_reqs: int) -> str | None:  # noqa: ARG002 - the protocol's
        """See `AttentionBackend.why_not_fixed`."""
        return None

    def fixed_plan(self, batch: ForwardBatch) -> FlashInferFixedPlan:
        """See `AttentionBackend.fixed_plan`.

        Raises:
            CaptureError: the wrapper refuses the shape.
        """
        sub_pool, page_size = self.pool.geometry.sub_pool, self.pool.geometry.page_size
        if batch.extend is None:
            wrapper = self._fixed.decode_wrapper(self._new_decode, batch.num_reqs)
            plan = partial(self._plan_decode, wrapper)
            table = whole_table(
                batch.page_groups[sub_pool], query_lens=batch.query_lens_host(), seq_lens=batch.seq_lens_host
            )
        else:
            wrapper = self._fixed.prefill_wrapper(self._new_prefill, batch.num_reqs)
            plan = partial(self._plan_extend, wrapper)
            # Its tokens are the most that any later plan of the wrapper may have, and as many as it is captured with.
            num_pages = min(self._most_pages, -(-batch.num_tokens // page_size))
            table = sink_table(num_rows=batch.num_reqs, num_tokens=batch.num_tokens, num_pages=num_pages)
        try:
            plan(table)
        except ValueError as error:
            raise CaptureError(f"flashinfer plans no graph of this shape: {error}") from error
        slots = self._fixed.slots(batch.num_tokens)
        metadata = FlashInferMetadata(out_cache_loc=slots, num_tokens=batch.num_tokens, wrapper=wrapper)
        return FlashInferFixedPlan(metadata, plan, sub_pool=sub_pool)

    def run(self, queries: Tensor, keys: Tensor, values: Tensor, *, layer: int, metadata: FlashInferMetadata) -> Tensor:
        """See `AttentionBackend.run`.

        Raises:
            InternalFault: another step was planned since.
        """
        if metadata.number not in (None, self._number):
            raise InternalFault("flashinfer attention was planned for another step since")
        self.pool.write(layer, slots=metadata.out_cache_loc, keys=keys, values=values)
        output = metadata.wrapper.run(queries[: metadata.num_tokens].contiguous(), self.pool.pages(layer))
        return with_padding(output.view(metadata.num_tokens, -1), num_tokens=len(queries))

    def _plan_decode(self, wrapper: PagedWrapper, table: RowTable) -> None:
        wrapper.plan(
            _on_host(table.kv_indptr),
            _on_host(table.kv_indices),
            _on_host(table.last_page_lens(self.pool.geometry.page_size)),
            self._num_q_heads,
            self.pool.geometry.num_kv_heads,
            self.pool.geometry.head_dim,
            self.pool.geometry.page_size,
            **self._options(),
        )

    def _plan_extend(self, wrapper: PagedWrapper, table: RowTable) -> None:
        wrapper.plan(
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
