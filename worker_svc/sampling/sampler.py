"""Logits to token ids: a row's rules first, then greedy, or the arg-max of value plus noise over the ids that survive.

Knows nothing of plans, pages or models. Guards: a row's token is a function of its own logits, rules, parameters, seed,
position and sample index only, bit for bit; ties go to the lowest id.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker_svc.batch.row_groups import BestLogits, SamplingGroup
from worker_svc.device.host_staging import ToHost, direct_to_host
from worker_svc.sampling.candidates import scaled_row, surviving_ids
from worker_svc.sampling.philox import GUMBEL_MAX, gumbels, noise_words
from worker_svc.sampling.ruled_row import ruled_row

Array = np.ndarray

_ROWS_PER_BLOCK = 16
_ROUNDING_MARGIN = 1e-3
_NEAR = np.float32(-4.0)
_FEW = 256
_NO_ID = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledRows:
    """What the K sampled rows gave, on the host."""

    token_ids: Array
    """[K] int32: 0 where nothing was drawn."""
    finite: Array
    """[K] bool: the row's logits hold no NaN and their maximum is finite."""
    has_candidate: Array
    """[K] bool: the row's rules left an id with a finite logit. Not above `finite`."""


def sample(
    logits: Tensor, group: SamplingGroup, *, best: BestLogits | None = None, to_host: ToHost = direct_to_host
) -> SampledRows:
    """The tokens of the K rows; the logits are untouched.

    Args:
        logits: [K, logits_width] float32; with `best`, rows that are not plainly greedy, at the places it names.
        group: how each row samples.
        best: the arg-max of each row, where it is known already.
        to_host: how it comes to the host where it is not.
    """
    best = best or best_of_rows(logits, to_host)
    finite = np.isfinite(best.values)
    has_candidate = finite.copy()
    token_ids = np.where(finite, best.ids, 0)
    has_rules = np.zeros(len(finite), bool)
    has_rules[list(group.rules)] = True
    worked_rows = np.flatnonzero(finite & ((group.temperatures > 0) | has_rules))
    for begin in range(0, len(worked_rows), _ROWS_PER_BLOCK):
        block = worked_rows[begin : begin + _ROWS_PER_BLOCK]
        rows = host_rows(logits, best.places[block])
        for place, k in enumerate(block.tolist()):
            if has_rules[k]:
                rows[place] = ruled_row(rows[place], group.rules[k])
                token_ids[k] = rows[place].argmax()
                has_candidate[k] = np.isfinite(rows[place][token_ids[k]])
        drawn = np.flatnonzero(has_candidate[block] & (group.temperatures[block] > 0))
        if len(drawn):
            k = block[drawn]
            token_ids[k] = _draw([rows[place] for place in drawn], k, group=group, best_ids=token_ids[k])
    token_ids[~has_candidate] = 0
    return SampledRows(token_ids=token_ids.astype(np.int32), finite=finite, has_candidate=has_candidate)


def best_of_rows(logits: Tensor, to_host: ToHost = direct_to_host) -> BestLogits:
    """Of [K, logits_width] float32. From a device come the ids and values only, together."""
    places = np.arange(len(logits))
    if logits.device.type == "cpu":
        host = logits.detach().numpy()
        ids = host.argmax(axis=-1)
        return BestLogits(ids=ids, values=host[places, ids], places=places)
    values, device_ids = torch.max(logits, dim=-1)
    ids, best = to_host(device_ids, values)
    return BestLogits(ids=ids, values=best, places=places)


def host_rows(logits: Tensor, rows: Array) -> list[Array]:
    """The rows on the host, one array each: views on the CPU, copies of just these from a device."""
    if logits.device.type == "cpu":
        host = logits.detach().numpy()
        return [host[row] for row in rows]
    return list(logits[torch.from_numpy(rows).to(logits.device)].cpu().numpy())


def _draw(rows: list[Array], block: Array, *, group: SamplingGroup, best_ids: Array) -> Array:
    """[len(block)] int64: one drawn id per row. Only integer and elementwise work spans rows."""
    noise = _Noise(group, block)
    floors = _floors(noise, group.top_ks[block], best_ids=best_ids)
    survivors: list[_Candidates] = []
    for place, (row, k, best_id) in enumerate(zip(rows, block, best_ids, strict=True)):
        scaled = scaled_row(row, best=row[best_id], temperature=group.temperatures[k])
        ids = surviving_ids(
            scaled,
            top_k=int(group.top_ks[k]),
            top_p=float(group.top_ps[k]),
            min_p=float(group.min_ps[k]),
            floor=floors[place],
        )
        survivors.append(_Candidates(ids, scaled[ids]))
    # Most rows are decided by the ids near the best one: their best score rules out most of the others unseen.
    near = [candidates if candidates.are_few else candidates.near() for candidates in survivors]
    near_ids, near_scores = _best_of(near, noise)
    far = [
        _NOTHING if candidates.are_few else candidates.far(least=_floor(score))
        for candidates, score in zip(survivors, near_scores, strict=True)
    ]
    far_ids, far_scores = _best_of(far, noise)
    wins = (far_scores > near_scores) | ((far_scores == near_scores) & (far_ids < near_ids))
    return np.where(wins, far_ids, near_ids)


def _floors(noise: "_Noise", top_ks: Array, *, best_ids: Array) -> list[float]:
    """Below which values the ids of each row need not be looked at; -inf where few are left anyway."""
    floors = [-np.inf] * len(top_ks)
    places = np.flatnonzero((top_ks == 0) | (top_ks > _FEW))
    if len(places):
        for place, score in zip(places.tolist(), noise.of(places, best_ids[places]), strict=True):
            floors[place] = _floor(score)
    return floors


def _floor(score: np.float32) -> float:
    """An id whose value is below this stays below `score` with the largest noise there is, rounding included."""
    return float(score) - float(GUMBEL_MAX) - _ROUNDING_MARGIN


class _Candidates(NamedTuple):
    """Ids of one row and their values."""

    ids: Array
    values: Array

    @property
    def are_few(self) -> bool:
        """So few that the noise of all costs less than telling them apart."""
        return len(self.ids) <= _FEW

    def near(self) -> "_Candidates":
        """Those near the best one."""
        return self._where(self.values >= _NEAR)

    def far(self, *, least: float) -> "_Candidates":
        """The others from `least` on."""
        return self._where((self.values < _NEAR) & (self.values >= np.float32(least)))

    def _where(self, kept: Array) -> "_Candidates":
        return _Candidates(self.ids[kept], self.values[kept])


_NOTHING = _Candidates(np.empty(0, np.int64), np.empty(0, np.float32))


class _Noise:
    """The noise of a block of rows."""

    def __init__(self, group: SamplingGroup, block: Array) -> None:
        self._seeds = group.seeds[block]
        self._positions = group.positions[block]
        self._sample_indices = group.sample_indices[block]

    def of(self, places: Array, ids: Array) -> Array:
        """[n] float32: noise of id `ids[i]` in the block's row `places[i]`."""
        words = noise_words(
            self._seeds[places],
            ids=ids,
            positions=self._positions[places],
            sample_indices=self._sample_indices[places],
        )
        return gumbels(words)


def _best_of(rows: list[_Candidates], noise: _Noise) -> tuple[Array, Array]:
    """([rows] int64 id of the largest value + noise, ties by lowest id; [rows] float32 that score, -inf if none)."""
    counts = np.array([len(candidates.ids) for candidates in rows])
    best_ids = np.full(len(rows), _NO_ID)
    best_scores = np.full(len(rows), -np.inf, np.float32)
    if not counts.any():
        return best_ids, best_scores
    ids = np.concatenate([candidates.ids for candidates in rows])
    values = np.concatenate([candidates.values for candidates in rows])
    scores = values + noise.of(np.repeat(np.arange(len(rows)), counts), ids)
    filled = np.flatnonzero(counts)
    begins = (np.cumsum(counts) - counts)[filled]
    best_scores[filled] = np.maximum.reduceat(scores, begins)
    is_best = scores == np.repeat(best_scores, counts)
    best_ids[filled] = np.minimum.reduceat(np.where(is_best, ids, _NO_ID), begins)
    return best_ids, best_scores
