"""Log-probabilities of the model's raw distribution, for the rows that ask.

Raw: before temperature, filters, penalties and masks. Knows nothing of plans. Works row by row and never copies the
logits as a whole.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from worker_svc.batch.row_groups import BestLogits, LogprobGroup
from worker_svc.sampling.candidates import ranked_ids
from worker_svc.sampling.sampler import SampledRows, host_rows

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledLogprobs:
    """Log-probabilities at the sampled positions, K rows."""

    tokens: Array
    """[K] float32: of the sampled token; 0 where not wanted."""
    top_counts: Array
    """[K] int64: best tokens returned per row."""
    top_ids: Array
    """[sum(top_counts)] int32: best first, ties by lowest id."""
    top_values: Array
    """[sum(top_counts)] float32"""


def sampled_logprobs(
    logits: Tensor, sampled: SampledRows, group: LogprobGroup, *, best: BestLogits | None = None
) -> SampledLogprobs:
    """What `group` asks for, of `logits` [K, logits_width] float32, or at the places that `best` names.

    Rows without a token give nothing.
    """
    tokens = np.zeros(len(group.wanted), np.float32)
    is_drawn = sampled.finite & sampled.has_candidate
    top_counts = np.where(is_drawn, np.minimum(group.top_counts, logits.shape[-1]), 0)
    top_ids: list[Array] = [np.empty(0, np.int64)]
    top_values: list[Array] = [np.empty(0, np.float32)]
    rows = np.flatnonzero(is_drawn & group.is_wanted())
    places = rows if best is None else best.places[rows]
    for k, row in zip(rows, host_rows(logits, places), strict=True):
        normalizer = log_normalizer(row)
        if group.wanted[k]:
            tokens[k] = np.float64(row[sampled.token_ids[k]]) - normalizer
        if top_counts[k]:
            ids = ranked_ids(row, int(top_counts[k]))
            top_ids.append(ids)
            top_values.append((row[ids].astype(np.float64) - normalizer).astype(np.float32))
    return SampledLogprobs(
        tokens=tokens,
        top_counts=top_counts,
        top_ids=np.concatenate(top_ids).astype(np.int32),
        top_values=np.concatenate(top_values),
    )


def log_normalizer(row: Array) -> np.float64:
    """ln(sum(exp(row))), float64; subtract it from a value to get its log-probability."""
    best = row.max()
    return np.float64(best) + np.log(np.exp(row - best).sum(dtype=np.float64))
