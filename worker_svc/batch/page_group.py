"""PageGroup: the pages of one sub-pool in one forward, and where the forward writes in it.

Made by `builder`, read by attention and the kernels, lives for one step. Guards: write slots come from binding the
step's write plan, or are the sink; host copy equals device tensor.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from worker_svc.batch.owned import Array, frozen_copy, is_same, with_tail
from worker_svc.device.host_staging import device_copy

SINK_SLOT = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageGroup:
    """Pages of one sub-pool, and where this step writes in it. Host arrays are read-only."""

    sub_pool: int
    """Index into the worker's geometry."""
    kv_indptr: Tensor
    """[num_reqs + 1] int32, owned: row r uses kv_indices[kv_indptr[r]:kv_indptr[r + 1]]; first 0."""
    kv_indices: Tensor
    """[kv_indptr[num_reqs]] int32, owned: pages in the order of positions; 0, the sink, in padding rows only."""
    kv_last_page_len: Tensor
    """[num_reqs] int32, owned: used slots of the row's last page, 1..page_size; 0 where the row has no page."""
    out_cache_loc: Tensor
    """[num_tokens] int64, owned: device slot each token writes to; 0 = the sink, never read."""
    kv_indptr_host: Array
    """[num_reqs + 1] int32"""
    kv_indices_host: Array
    """[kv_indptr[num_reqs]] int32"""
    kv_last_page_len_host: Array
    """[num_reqs] int32"""
    start_positions_host: Array
    """[num_reqs] int32: position of the first slot of the row's first listed page; 0 but in a window sub-pool."""

    def check(self, *, num_reqs: int, num_tokens: int) -> None:
        """Assert that shapes and host copies agree. Reads the device: for tests."""
        assert self.kv_indptr.shape == (num_reqs + 1,)
        assert self.kv_indptr_host[0] == 0
        assert self.kv_indices.shape == (int(self.kv_indptr_host[-1]),)
        assert self.kv_last_page_len.shape == self.start_positions_host.shape == (num_reqs,)
        assert self.out_cache_loc.shape == (num_tokens,)
        assert is_same(self.kv_indptr, self.kv_indptr_host)
        assert is_same(self.kv_indices, self.kv_indices_host)
        assert is_same(self.kv_last_page_len, self.kv_last_page_len_host)

    def pad(self, *, num_reqs: int, num_tokens: int, pages_per_row: int) -> "PageGroup":
        """More rows of `pages_per_row` pages (0 or 1) of the sink each, and more tokens that write to the sink."""
        rows = num_reqs - len(self.kv_last_page_len_host)
        last = int(self.kv_indptr_host[-1])
        more_ends = last + pages_per_row * np.arange(1, rows + 1)
        return self._with(
            indptr=np.concatenate([self.kv_indptr_host, more_ends]).astype(np.int32),
            indices=np.concatenate([self.kv_indices_host, np.zeros(rows * pages_per_row, np.int32)]),
            last_lens=np.concatenate([self.kv_last_page_len_host, np.full(rows, pages_per_row, np.int32)]),
            starts=np.concatenate([self.start_positions_host, np.zeros(rows, np.int32)]),
            slots=with_tail(self.out_cache_loc, num_tokens, fill=SINK_SLOT),
        )

    def trim(self, *, num_reqs: int, num_tokens: int) -> "PageGroup":
        """The first rows and tokens only."""
        indptr = self.kv_indptr_host[: num_reqs + 1]
        return self._with(
            indptr=indptr,
            indices=self.kv_indices_host[: indptr[-1]],
            last_lens=self.kv_last_page_len_host[:num_reqs],
            starts=self.start_positions_host[:num_reqs],
            slots=self.out_cache_loc[:num_tokens].clone(),
        )

    def diverted(self, is_diverted: Tensor) -> "PageGroup":
        """The same pages; tokens of which `is_diverted` [num_tokens] is true write to the sink."""
        return replace(self, out_cache_loc=self.out_cache_loc.masked_fill(is_diverted, SINK_SLOT))

    def _with(self, *, indptr: Array, indices: Array, last_lens: Array, starts: Array, slots: Tensor) -> "PageGroup":
        device = self.kv_indptr.device
        return PageGroup(
            sub_pool=self.sub_pool,
            kv_indptr=device_copy(indptr, device),
            kv_indices=device_copy(indices, device),
            kv_last_page_len=device_copy(last_lens, device),
            out_cache_loc=slots,
            kv_indptr_host=frozen_copy(indptr),
            kv_indices_host=frozen_copy(indices),
            kv_last_page_len_host=frozen_copy(last_lens),
            start_positions_host=frozen_copy(starts),
        )


def sink_group(sub_pool: int, device: torch.device) -> PageGroup:
    """Of one row of one token in the sink page."""
    zero, one = frozen_copy(np.zeros(1, np.int32)), frozen_copy(np.ones(1, np.int32))
    indptr = frozen_copy(np.array([0, 1], np.int32))
    return PageGroup(
        sub_pool=sub_pool,
        kv_indptr=device_copy(indptr, device),
        kv_indices=device_copy(zero, device),
        kv_last_page_len=device_copy(one, device),
        out_cache_loc=torch.full((1,), SINK_SLOT, dtype=torch.int64, device=device),
        kv_indptr_host=indptr,
        kv_indices_host=zero,
        kv_last_page_len_host=one,
        start_positions_host=zero,
    )
