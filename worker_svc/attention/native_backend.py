"""Attention on the native CPU kernels: pages are read in place, nothing is gathered.

Same bits for a row in any batch and any chunking; what a step allocates does not depend on the context. Knows nothing
of how the library is found. Guards: rows without tokens never reach the library, which refuses them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.errors import KernelError
from kernels.native import ThreadPool
from kernels.native_model import StepPages
from kernels.native_ops import PagedRowTable, paged_attention
from protos.wire.errors import DeviceFault
from worker_svc.attention.base import NothingFixed, with_padding
from worker_svc.attention.row_tables import row_table
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.kv.token_to_kv_pool import TokenToKVPool

_NO_SLOTS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NativeMetadata:
    """One step's plan. Lives until the step's forward is done; its arrays are the batch's own."""

    out_cache_loc: Tensor
    num_tokens: int
    """Padding tokens left out: the library computes rows only."""
    table: PagedRowTable


class NativeAttention(NothingFixed):
    """The back-end for the CPU. Its pool is in `KVOrder.NATIVE`; the threads are lent."""

    parts = ()

    def __init__(self, pool: TokenToKVPool, *, threads: ThreadPool) -> None:
        self.pool = pool
        self._threads = threads

    def plan(self, batch: ForwardBatch) -> NativeMetadata:
        """Name each row's tokens and pages."""
        group = batch.page_groups[self.pool.geometry.sub_pool]
        rows = row_table(group, query_lens=batch.query_lens_host(), seq_lens=batch.seq_lens_host)
        pages = StepPages(
            kv_indptr=rows.kv_indptr,
            kv_indices=rows.kv_indices,
            out_cache_loc=_NO_SLOTS,
            start_positions=rows.start_positions,
        )
        table = PagedRowTable(qo_indptr=rows.qo_indptr, seq_lens=rows.seq_lens, pages=pages)
        return NativeMetadata(out_cache_loc=group.out_cache_loc, num_tokens=rows.num_tokens, table=table)

    def run(self, queries: Tensor, keys: Tensor, values: Tensor, *, layer: int, metadata: NativeMetadata) -> Tensor:
        """See `AttentionBackend.run`.

        Raises:
            DeviceFault: the library refused what validation let through; nothing was computed.
        """
        self.pool.write(layer, slots=metadata.out_cache_loc, keys=keys, values=values)
        try:
            output = paged_attention(
                self._threads,
                queries[: metadata.num_tokens].float().numpy(),
                self.pool.pages(layer).numpy(),
                table=metadata.table,
                scale=self.pool.geometry.head_dim**-0.5,
                window=self.pool.geometry.attention_window,
            )
        except KernelError as error:
            raise DeviceFault(f"native attention: {error}") from error
        made = torch.from_numpy(output).view(metadata.num_tokens, -1).to(queries.dtype)
        return with_padding(made, num_tokens=len(queries))
