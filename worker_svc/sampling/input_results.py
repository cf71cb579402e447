"""What the input tokens of one plan's rows gave: log-probabilities and hidden states, packed as the result's columns.

Made per plan beside `RowResults`. Guards: forwards add their rows in order; a failed row gives nothing.
"""

import numpy as np
import torch
from torch import Tensor

from protos.wire.enums import HiddenMode
from protos.wire.plan import ForwardPlan
from protos.wire.result import ResultHiddenStates
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.batch.row_groups import PromptLogprobGroup
from worker_svc.sampling.prompt_logprobs import PromptLogprobs

Array = np.ndarray


class InputResults:
    """Rows of a plan; those that nothing was added for give nothing."""

    def __init__(self, plan: ForwardPlan) -> None:
        self._num_rows = plan.rows.num_rows
        self._wants_prompt = plan.logprobs is not None and plan.logprobs.prompt_starts is not None
        self._wants_top = plan.logprobs is not None and plan.logprobs.prompt_top_counts is not None
        self._wants_hidden = plan.rows.hidden_modes is not None
        self._prompt: list[tuple[Array, PromptLogprobs]] = []
        self._hidden: list[tuple[Array, Tensor]] = []

    def add_prompt(self, group: PromptLogprobGroup, given: PromptLogprobs, *, first_row: int) -> None:
        """Log-probabilities of a forward whose first row is `first_row` of the plan."""
        self._prompt.append((first_row + group.rows, given))

    def add_hidden(self, batch: ForwardBatch, *, last_hidden: Tensor, hidden: Tensor | None, first_row: int) -> None:
        """The states that the forward's rows ask for. Copies them off the device.

        Args:
            batch: of the forward.
            last_hidden: [num_reqs, hidden_size]
            hidden: [num_tokens, hidden_size]; None where no row asks for all.
            first_row: of the forward, in the plan.
        """
        assert batch.hidden is not None
        rows, tokens = _wanted_states(batch)
        if not len(rows):
            return
        states, places = (last_hidden, rows) if hidden is None else (hidden, tokens)
        self._hidden.append(
            (first_row + rows, states.index_select(0, torch.from_numpy(places).to(states.device)).cpu())
        )

    def prompt_columns(self, failed: Array) -> dict[str, Array]:
        """The prompt columns of `ResultLogprobs`; empty if the plan asked for none. `failed`: [R] bool."""
        if not self._wants_prompt:
            return {}
        rows = _joined([rows for rows, _ in self._prompt], np.int64)
        kept = ~failed[rows]
        columns = {
            "prompt_indptr": self._indptr(rows[kept]),
            "prompt": _joined([given.values for _, given in self._prompt], np.float32)[kept],
        }
        if not self._wants_top:
            return columns
        counts = _joined([given.top_counts for _, given in self._prompt], np.int64)
        kept_top = np.repeat(kept, counts)
        indptr = np.zeros(int(kept.sum()) + 1, np.uint32)
        np.cumsum(counts[kept], out=indptr[1:])
        return columns | {
            "prompt_top_indptr": indptr,
            "prompt_top_ids": _joined([given.top_ids for _, given in self._prompt], np.int32)[kept_top],
            "prompt_top_values": _joined([given.top_values for _, given in self._prompt], np.float32)[kept_top],
        }

    def hidden_states(self, failed: Array) -> ResultHiddenStates | None:
        """What the plan asked for; None if it asked for nothing. `failed`: [R] bool."""
        if not self._wants_hidden:
            return None
        parts = []
        for rows, states in self._hidden:
            parts.append((rows[~failed[rows]], states[torch.from_numpy(~failed[rows])]))
        dtype = self._hidden[0][1].dtype if self._hidden else torch.float32
        return ResultHiddenStates(
            dtype=str(dtype).removeprefix("torch."),
            hidden_size=self._hidden[0][1].shape[-1] if self._hidden else 0,
            indptr=self._indptr(_joined([rows for rows, _ in parts], np.int64)),
            states=_joined([states.view(torch.uint8).numpy().ravel() for _, states in parts], np.uint8),
        )

    def _indptr(self, rows: Array) -> Array:
        """[R + 1] uint32: how many elements each row has, summed up."""
        indptr = np.zeros(self._num_rows + 1, np.uint32)
        np.cumsum(np.bincount(rows, minlength=self._num_rows), out=indptr[1:])
        return indptr


def _wanted_states(batch: ForwardBatch) -> tuple[Array, Array]:
    """([n] row of the batch, [n] index of the token) of the states that rows ask for, in row order."""
    assert batch.hidden is not None
    modes = batch.hidden.modes
    lengths = batch.query_lens_host().astype(np.int64)
    counts = np.where(modes == HiddenMode.FULL, lengths, np.where(modes == HiddenMode.LAST, 1, 0))
    ends = np.cumsum(lengths)
    rows = np.repeat(np.arange(len(modes)), counts)
    in_row = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, np.repeat(ends - counts, counts) + in_row


def _joined(parts: list[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate([np.empty(0, dtype), *parts])
