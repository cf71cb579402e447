"""Log-probabilities of input tokens, from the hidden states before them, block by block.

Knows nothing of plans or models. Guards: at most one block of logits exists at a time, whatever the prompt's length; a
position's numbers have the bits that a sampled row of the same state gets.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker_svc.batch.row_groups import PromptLogprobGroup
from worker_svc.sampling.candidates import ranked_ids
from worker_svc.sampling.logprobs import log_normalizer
from worker_svc.sampling.sampler import host_rows

Array = np.ndarray
OutputLayer = Callable[[Tensor], Tensor]
"""[n, logits_width] float32 logits of [n, hidden_size] states."""

BLOCK_BYTES = 16 << 20
"""Most memory of one block of logits, unless so few rows do not fill one product."""
_ROWS_OF_A_PRODUCT = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptLogprobs:
    """What P positions gave, on the host."""

    values: Array
    """[P] float32: log-probability of the token that follows; 0 where not finite."""
    top_counts: Array
    """[P] int64: best tokens returned."""
    top_ids: Array
    """[sum(top_counts)] int32: best first, ties by lowest id."""
    top_values: Array
    """[sum(top_counts)] float32"""
    finite: Array
    """[P] bool: the position's logits hold no NaN and their maximum is finite."""


def block_rows(logits_width: int, *, block_bytes: int = BLOCK_BYTES) -> int:
    """How many rows of logits may exist at a time: whole products, at least one."""
    fits = block_bytes // (4 * logits_width)
    return max(fits // _ROWS_OF_A_PRODUCT, 1) * _ROWS_OF_A_PRODUCT


def prompt_logprobs(
    hidden: Tensor, logits_of: OutputLayer, group: PromptLogprobGroup, *, max_rows: int
) -> PromptLogprobs:
    """What `group` asks for.

    Args:
        hidden: [num_tokens, hidden_size], final states of all tokens of the batch.
        logits_of: the output layer.
        group: which positions.
        max_rows: rows of logits that may exist at a time.
    """
    num_positions = len(group.rows)
    values = np.zeros(num_positions, np.float32)
    finite = np.ones(num_positions, bool)
    top_counts = np.zeros(num_positions, np.int64)
    top_ids: list[Array] = [np.empty(0, np.int64)]
    top_values: list[Array] = [np.empty(0, np.float32)]
    for begin in range(0, num_positions, max_rows):
        places = np.arange(begin, min(begin + max_rows, num_positions))
        states = hidden.index_select(0, torch.from_numpy(group.token_rows[places]).to(hidden.device))
        logits = logits_of(states)
        for place, row in zip(places, host_rows(logits, np.arange(len(places))), strict=True):
            normalizer = log_normalizer(row)
            finite[place] = np.isfinite(normalizer)
            if not finite[place]:
                continue
            values[place] = np.float64(row[group.target_ids[place]]) - normalizer
            if group.top_counts[place]:
                ids = ranked_ids(row, int(group.top_counts[place]))
                top_counts[place] = len(ids)
                top_ids.append(ids)
                top_values.append((row[ids].astype(np.float64) - normalizer).astype(np.float32))
        del logits, row  # the next block takes their place
    return PromptLogprobs(
        values=values,
        top_counts=top_counts,
        top_ids=np.concatenate(top_ids).astype(np.int32),
        top_values=np.concatenate(top_values),
        finite=finite,
    )
