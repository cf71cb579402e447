"""Logits to token ids: greedy, or the arg-max of value plus noise over the ids that survive a row's filters.

Knows nothing of plans, pages or models. Guards: a row's token is a function of its own logits, parameters, seed,
position and sample index only, bit for bit; ties go to the lowest id.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker_svc.batch.forward_batch import SamplingGroup
from worker_svc.sampling.candidates import scaled_row, surviving_ids
from worker_svc.sampling.philox import GUMBEL_MAX, gumbels, noise_words

Array = np.ndarray

_ROWS_PER_BLOCK = 16
_ROUNDING_MARGIN = 1e-3
_NO_ID = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledRows:
    """What the K sampled rows gave, on the host."""

    token_ids: Array
    """[K] int32: 0 where the row is not finite."""
    finite: Array
    """[K] bool: the row's logits hold no NaN and their maximum is finite."""


def sample(logits: Tensor, group: SamplingGroup) -> SampledRows:
    """The tokens of `logits` [K, logits_width] float32; the logits are untouched."""
    best_ids, best_values = best_of_rows(logits)
    finite = np.isfinite(best_values)
    token_ids = np.where(finite, best_ids, 0)
    random_rows = np.flatnonzero(finite & (group.temperatures > 0))
    for begin in range(0, len(random_rows), _ROWS_PER_BLOCK):
        block = random_rows[begin : begin + _ROWS_PER_BLOCK]
        token_ids[block] = _draw(host_rows(logits, block), block, group=group, best_ids=best_ids[block])
    return SampledRows(token_ids=token_ids.astype(np.int32), finite=finite)


def best_of_rows(logits: Tensor) -> tuple[Array, Array]:
    """([K] int64 lowest id of the largest value, [K] float32 that value, NaN if the row holds one)."""
    if logits.device.type == "cpu":
        host = logits.detach().numpy()
        ids = host.argmax(axis=-1)
        return ids, host[np.arange(len(ids)), ids]
    values, device_ids = torch.max(logits, dim=-1)
    return device_ids.cpu().numpy(), values.cpu().numpy()


def host_rows(logits: Tensor, rows: Array) -> list[Array]:
    """The rows on the host, one array each: views on the CPU, copies of just these from a device."""
    if logits.device.type == "cpu":
        host = logits.detach().numpy()
        return [host[row] for row in rows]
    return list(logits[torch.from_numpy(rows).to(logits.device)].cpu().numpy())


def _draw(rows: list[Array], block: Array, *, group: SamplingGroup, best_ids: Array) -> Array:
    """[len(block)] int64: one drawn id per row. Only integer and elementwise work spans rows."""
    best_noise = gumbels(
        noise_words(
            group.seeds[block],
            ids=best_ids,
            positions=group.positions[block],
            sample_indices=group.sample_indices[block],
        )
    )
    # The best id scores its noise alone, so an id that stays below that with the largest noise there is cannot win.
    floors = best_noise.astype(np.float64) - float(GUMBEL_MAX) - _ROUNDING_MARGIN
    ids_of_rows: list[Array] = []
    values_of_rows: list[Array] = []
    for row, k, best_id, floor in zip(rows, block, best_ids, floors, strict=True):
        scaled = scaled_row(row, best=row[best_id], temperature=group.temperatures[k])
        ids = surviving_ids(
            scaled,
            top_k=int(group.top_ks[k]),
            top_p=float(group.top_ps[k]),
            min_p=float(group.min_ps[k]),
            floor=float(floor),
        )
        ids_of_rows.append(ids)
        values_of_rows.append(scaled[ids])
    counts = np.array([len(ids) for ids in ids_of_rows])
    ids = np.concatenate(ids_of_rows)
    words = noise_words(
        np.repeat(group.seeds[block], counts),
        ids=ids,
        positions=np.repeat(group.positions[block], counts),
        sample_indices=np.repeat(group.sample_indices[block], counts),
    )
    return _best_of_segments(np.concatenate(values_of_rows) + gumbels(words), ids, counts=counts)


def _best_of_segments(scores: Array, ids: Array, *, counts: Array) -> Array:
    """[len(counts)] int64: the id of the largest score of each segment, ties by lowest id."""
    begins = np.cumsum(counts) - counts
    best = np.maximum.reduceat(scores, begins)
    return np.minimum.reduceat(np.where(scores == np.repeat(best, counts), ids, _NO_ID), begins)
