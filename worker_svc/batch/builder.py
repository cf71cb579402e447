"""ForwardPlan -> one ForwardBatch per forward.

Vectorised over rows and tokens; knows nothing of models, attention or sampling. Guards: the plan's columns are only
read, every tensor and host array of a batch is a copy of its own, and slots are translated once per plan and sub-pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from protos.wire.enums import HiddenMode
from protos.wire.plan import Forward, ForwardPlan, PageTable
from worker_svc.batch.forward_batch import ExtendGroup, ForwardBatch, PageGroup
from worker_svc.batch.forward_mode import ModeTraits, traits_of
from worker_svc.batch.positions import decode_positions, extend_positions, page_places, start_offsets, token_rows
from worker_svc.batch.prompt_rows import hidden_group, prompt_logprob_group
from worker_svc.batch.sampled_rows import logprob_group, sampling_group

Array = np.ndarray


class SlotTranslator(Protocol):
    """Turns places in a sub-pool's pages into device slots; keeps nothing between plans."""

    def slots(self, sub_pool: int, pages: Array, offsets: Array) -> Array:
        """[n] int64 slots of the places (pages[i], offsets[i])."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _TokenLayout:
    """Where each token of a plan belongs. Made once per plan."""

    starts: Array
    """[R + 1] int64: index of each row's first token, then T."""
    rows: Array
    """[T] int64: row of each token."""
    positions: Array
    """[T] int64"""


class BatchBuilder:
    """Builds batches for one device. Keeps no plan and no batch."""

    def __init__(
        self,
        *,
        translator: SlotTranslator,
        page_sizes: Sequence[int],
        device: torch.device,
        hidden_mode: HiddenMode = HiddenMode.NULL,
    ) -> None:
        """Build for one device.

        Args:
            translator: of the worker's pools.
            page_sizes: of each sub-pool.
            device: where tensors go.
            hidden_mode: which hidden states every forward keeps at least.
        """
        self._translator = translator
        self._hidden_mode = hidden_mode
        self._page_sizes = tuple(page_sizes)
        self._device = device

    def build(self, plan: ForwardPlan) -> tuple[ForwardBatch, ...]:
        """The batches of a validated plan, in the order of its forwards."""
        layout = _layout(plan)
        tables = sorted(plan.page_tables, key=lambda table: table.sub_pool)
        slots = [self._slots(table, layout) for table in tables]
        return tuple(self._batch(plan, forward, layout=layout, tables=tables, slots=slots) for forward in plan.forwards)

    def _slots(self, table: PageTable, layout: _TokenLayout) -> Array:
        """[T] int64: slot each token of the plan writes to in one sub-pool."""
        pages, offsets = page_places(
            layout.positions,
            layout.rows,
            kv_indptr=table.indptr,
            kv_indices=table.indices,
            start_positions=_start_positions(table),
            page_size=self._page_sizes[table.sub_pool],
        )
        return self._translator.slots(table.sub_pool, pages, offsets)

    def _batch(
        self,
        plan: ForwardPlan,
        forward: Forward,
        *,
        layout: _TokenLayout,
        tables: Sequence[PageTable],
        slots: Sequence[Array],
    ) -> ForwardBatch:
        rows = slice(forward.row_begin, forward.row_end)
        begin, end = int(layout.starts[rows.start]), int(layout.starts[rows.stop])
        traits = traits_of(forward.mode)
        seq_lens = _owned(plan.rows.seq_lens[rows])
        last_tokens = layout.starts[rows.start + 1 : rows.stop + 1] - (begin + 1)
        sampled = np.flatnonzero(plan.rows.samples[rows]) if traits.samples else np.empty(0, np.int64)
        return ForwardBatch(
            forward_mode=forward.mode,
            logical_mode=forward.logical_mode,
            graph=forward.graph,
            num_reqs=rows.stop - rows.start,
            num_tokens=end - begin,
            input_ids=self._tensor(plan.tokens.ids[begin:end]),
            positions=self._tensor(_positions(plan, rows, traits=traits)),
            seq_lens=self._tensor(seq_lens),
            seq_lens_host=seq_lens,
            page_groups=tuple(
                self._page_group(table, rows, out_cache_loc=slot[begin:end])
                for table, slot in zip(tables, slots, strict=True)
            ),
            logits_rows=self._tensor(last_tokens[sampled]),
            last_token_rows=self._tensor(last_tokens),
            extend=self._extend_group(plan, rows) if traits.has_extend_group else None,
            sampling=sampling_group(plan, first_row=rows.start, sampled=sampled),
            logprobs=logprob_group(
                plan,
                first_row=rows.start,
                sampled=sampled,
                prompt=prompt_logprob_group(plan, rows, token_starts=layout.starts),
            ),
            hidden=hidden_group(plan, rows, server_mode=self._hidden_mode),
        )

    def _page_group(self, table: PageTable, rows: slice, *, out_cache_loc: Array) -> PageGroup:
        begin, end = int(table.indptr[rows.start]), int(table.indptr[rows.stop])
        indptr = _owned(table.indptr[rows.start : rows.stop + 1] - begin)
        indices = _owned(table.indices[begin:end])
        last_lens = _owned(table.last_page_lens[rows])
        return PageGroup(
            sub_pool=table.sub_pool,
            kv_indptr=self._tensor(indptr),
            kv_indices=self._tensor(indices),
            kv_last_page_len=self._tensor(last_lens),
            out_cache_loc=self._tensor(out_cache_loc),
            kv_indptr_host=indptr,
            kv_indices_host=indices,
            kv_last_page_len_host=last_lens,
            start_positions_host=_owned(_start_positions(table)[rows]),
        )

    def _extend_group(self, plan: ForwardPlan, rows: slice) -> ExtendGroup:
        extend_lens = _owned(plan.rows.extend_lens[rows])
        prefix_lens = _owned(plan.rows.first_positions[rows])
        starts = _owned(start_offsets(extend_lens))
        return ExtendGroup(
            extend_lens=self._tensor(extend_lens),
            prefix_lens=self._tensor(prefix_lens),
            extend_start_loc=self._tensor(starts),
            extend_lens_host=extend_lens,
            prefix_lens_host=prefix_lens,
            extend_start_loc_host=starts,
        )

    def _tensor(self, host: Array) -> Tensor:
        """A device tensor of its own storage, also on the CPU."""
        return torch.from_numpy(np.array(host)).to(self._device)


def _layout(plan: ForwardPlan) -> _TokenLayout:
    extend_lens = plan.rows.extend_lens
    starts = np.zeros(len(extend_lens) + 1, np.int64)
    np.cumsum(extend_lens, dtype=np.int64, out=starts[1:])
    return _TokenLayout(
        starts=starts,
        rows=token_rows(extend_lens),
        positions=extend_positions(plan.rows.first_positions, extend_lens),
    )


def _positions(plan: ForwardPlan, rows: slice, *, traits: ModeTraits) -> Array:
    if traits.has_extend_group:
        return extend_positions(plan.rows.first_positions[rows], plan.rows.extend_lens[rows])
    return decode_positions(plan.rows.seq_lens[rows])


def _start_positions(table: PageTable) -> Array:
    if table.start_positions is not None:
        return table.start_positions
    return np.zeros(len(table.last_page_lens), np.int32)


def _owned(values: Array) -> Array:
    """A read-only copy."""
    copy = np.array(values)
    copy.setflags(write=False)
    return copy
