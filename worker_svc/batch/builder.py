"""ForwardPlan -> one ForwardBatch per forward.

Vectorised over rows and tokens; knows nothing of models, attention or sampling. Guards: the plan's columns are only
read, every tensor and host array of a batch is a copy of its own, and slots are translated once per plan and sub-pool.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protos.wire.enums import HiddenMode
from protos.wire.plan import Forward, ForwardPlan, PageTable
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.batch.forward_mode import ModeTraits, traits_of
from worker_svc.batch.owned import Array, frozen_copy
from worker_svc.batch.page_group import PageGroup
from worker_svc.batch.positions import decode_positions, extend_positions, page_places, start_offsets, token_rows
from worker_svc.batch.prompt_rows import prompt_logprob_group
from worker_svc.batch.row_groups import ExtendGroup
from worker_svc.batch.sampled_rows import hidden_group, logprob_group, sampling_group
from worker_svc.device.host_staging import DirectStaging, StagingSlot
from worker_svc.kv.write_plan import SlotTranslator, WritePlan, window_index


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _TokenLayout:
    """Where each token of a plan belongs. Made once per plan."""

    starts: Array
    """[R + 1] int64: index of each row's first token, then T."""
    rows: Array
    """[T] int64: row of each token."""
    positions: Array
    """[T] int64"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """What the forwards of one plan share."""

    plan: ForwardPlan
    layout: _TokenLayout
    tables: list[PageTable]
    """By sub-pool."""
    write_plan: WritePlan
    tensor: Callable[[Array], Tensor]
    """A device tensor of a host array."""


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
        self._direct = DirectStaging(device)

    def build(self, plan: ForwardPlan, slot: StagingSlot | None = None) -> tuple[ForwardBatch, ...]:
        """The batches of a validated plan, in the order of its forwards.

        Args:
            plan: to be built.
            slot: what its tensors go through; None: each is copied by itself.
        """
        layout = _layout(plan)
        tables = sorted(plan.page_tables, key=lambda table: table.sub_pool)
        write_plan = WritePlan(self._translator, lambda sub_pool: self._places(tables[sub_pool], layout))
        tensor = (slot or self._direct).put
        step = _Step(plan=plan, layout=layout, tables=tables, write_plan=write_plan, tensor=tensor)
        return tuple(self._batch(step, forward) for forward in plan.forwards)

    def _places(self, table: PageTable, layout: _TokenLayout) -> tuple[Array, Array]:
        """([T] page, [T] offset in it): where each token of the plan belongs in one sub-pool."""
        return page_places(
            layout.positions,
            layout.rows,
            kv_indptr=table.indptr,
            kv_indices=table.indices,
            start_positions=_start_positions(table),
            page_size=self._page_sizes[table.sub_pool],
        )

    def _batch(self, step: _Step, forward: Forward) -> ForwardBatch:
        plan, layout = step.plan, step.layout
        rows = slice(forward.row_begin, forward.row_end)
        begin, end = int(layout.starts[rows.start]), int(layout.starts[rows.stop])
        traits = traits_of(forward.mode)
        seq_lens = frozen_copy(plan.rows.seq_lens[rows])
        last_tokens = layout.starts[rows.start + 1 : rows.stop + 1] - (begin + 1)
        sampled = np.flatnonzero(plan.rows.samples[rows]) if traits.samples else np.empty(0, np.int64)
        written = window_index(forward.write_window, rows=rows, starts=layout.starts)
        return ForwardBatch(
            forward_mode=forward.mode,
            logical_mode=forward.logical_mode,
            graph=forward.graph,
            input_ids=step.tensor(plan.tokens.ids[begin:end]),
            positions=step.tensor(_positions(plan, rows, traits=traits)),
            seq_lens=step.tensor(seq_lens),
            seq_lens_host=seq_lens,
            page_groups=tuple(
                _page_group(step, table, rows, slots=step.write_plan.bind(table.sub_pool, written))
                for table in step.tables
            ),
            logits_rows=step.tensor(last_tokens[sampled]),
            last_token_rows=step.tensor(last_tokens),
            write_plan=step.write_plan,
            extend=_extend_group(step, rows) if traits.has_extend_group else None,
            sampling=sampling_group(plan, first_row=rows.start, sampled=sampled),
            logprobs=logprob_group(
                plan,
                first_row=rows.start,
                sampled=sampled,
                prompt=prompt_logprob_group(plan, rows, token_starts=layout.starts),
            ),
            hidden=hidden_group(plan, rows, server_mode=self._hidden_mode),
        )


def _page_group(step: _Step, table: PageTable, rows: slice, *, slots: Array) -> PageGroup:
    begin, end = int(table.indptr[rows.start]), int(table.indptr[rows.stop])
    indptr = frozen_copy(table.indptr[rows.start : rows.stop + 1] - begin)
    indices = frozen_copy(table.indices[begin:end])
    last_lens = frozen_copy(table.last_page_lens[rows])
    return PageGroup(
        sub_pool=table.sub_pool,
        kv_indptr=step.tensor(indptr),
        kv_indices=step.tensor(indices),
        kv_last_page_len=step.tensor(last_lens),
        out_cache_loc=step.tensor(slots),
        kv_indptr_host=indptr,
        kv_indices_host=indices,
        kv_last_page_len_host=last_lens,
        start_positions_host=frozen_copy(_start_positions(table)[rows]),
    )


def _extend_group(step: _Step, rows: slice) -> ExtendGroup:
    plan = step.plan
    extend_lens = frozen_copy(plan.rows.extend_lens[rows])
    prefix_lens = frozen_copy(plan.rows.first_positions[rows])
    starts = frozen_copy(start_offsets(extend_lens))
    return ExtendGroup(
        extend_lens=step.tensor(extend_lens),
        prefix_lens=step.tensor(prefix_lens),
        extend_start_loc=step.tensor(starts),
        extend_lens_host=extend_lens,
        prefix_lens_host=prefix_lens,
        extend_start_loc_host=starts,
    )


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
