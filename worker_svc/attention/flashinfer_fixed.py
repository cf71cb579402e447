"""flashinfer inside captured graphs: wrappers in its CUDA graph mode, on tables that keep their addresses.

A wrapper of that mode belongs to one number of rows. Planning writes into its tables, before the replay and outside the
graph. What is large is shared by all of them, since each is planned anew for every replay and no two replay at once.
Written against flashinfer 0.6.18.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from worker_svc.attention.flashinfer_wrappers import FlashInferMetadata, PagedWrapper
from worker_svc.attention.row_tables import RowTable, whole_table
from worker_svc.batch.forward_batch import ForwardBatch

PLAN_BYTES = 1 << 20
"""Of what planning leaves for the kernels, a few dozen bytes for each tile of work. By itself a wrapper takes 8 MiB."""


class FixedTables:
    """Where wrappers of captured graphs find rows and pages."""

    def __init__(self, workspace: Tensor, *, most_pages: int) -> None:
        """`most_pages`: that one row lists."""
        self._workspace = workspace
        self._most_pages = most_pages
        self._indices = self._zeros(0)
        self._plan = torch.empty(0, dtype=torch.uint8, device=workspace.device)

    def slots(self, num_tokens: int) -> Tensor:
        """[num_tokens] int64: where tokens are written; the sink, as they are made."""
        return torch.zeros(num_tokens, dtype=torch.int64, device=self._workspace.device)

    def decode_wrapper(self, make: Callable[..., PagedWrapper], num_rows: int) -> PagedWrapper:
        """For steps of so many rows of one token. `make`: takes what differs in CUDA graph mode."""
        wrapper = make(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=self._zeros(num_rows + 1),
            paged_kv_indices_buffer=self._indices_for(num_rows),
            paged_kv_last_page_len_buffer=self._zeros(num_rows),
        )
        return self._small(wrapper)

    def prefill_wrapper(self, make: Callable[..., PagedWrapper], num_rows: int) -> PagedWrapper:
        """The same for rows of any number of tokens, none included. The first plan says how many they have together."""
        wrapper = make(
            use_cuda_graph=True,
            qo_indptr_buf=self._zeros(num_rows + 1),
            paged_kv_indptr_buf=self._zeros(num_rows + 1),
            paged_kv_indices_buf=self._indices_for(num_rows),
            paged_kv_last_page_len_buf=self._zeros(num_rows),
        )
        return self._small(wrapper)

    def _small(self, wrapper: PagedWrapper) -> PagedWrapper:
        if not len(self._plan):
            self._plan = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=self._workspace.device)
        wrapper.reset_workspace_buffer(self._workspace, self._plan)
        return wrapper

    def _indices_for(self, num_rows: int) -> Tensor:
        """[at least num_rows * most_pages] int32. The largest shape comes first; graphs before it keep the old one."""
        if len(self._indices) < num_rows * self._most_pages:
            self._indices = self._zeros(num_rows * self._most_pages)
        return self._indices

    def _zeros(self, length: int) -> Tensor:
        return torch.zeros(length, dtype=torch.int32, device=self._workspace.device)


class FlashInferFixedPlan:
    """See `FixedPlan`."""

    def __init__(self, metadata: FlashInferMetadata, plan: Callable[[RowTable], None], *, sub_pool: int) -> None:
        self.metadata = metadata
        self._plan = plan
        self._sub_pool = sub_pool

    def fill(self, batch: ForwardBatch) -> None:
        """See `FixedPlan.fill`."""
        group = batch.page_groups[self._sub_pool]
        self.metadata.out_cache_loc.copy_(group.out_cache_loc)
        self._plan(whole_table(group, query_lens=batch.query_lens_host(), seq_lens=batch.seq_lens_host))
