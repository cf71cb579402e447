"""Which ids of one row may be drawn: top-k, then top-p, then min-p. One row at a time.

Ids rank by value, best first, ties by lowest id. A row is worked on alone, in arrays of its own, so that nothing of its
batch-mates (count, filters, place in the batch) can change a bit of its result.
"""

import numpy as np
import torch

Array = np.ndarray

_FEW = 256
"""Up to here selecting the best values beats sorting all."""


def scaled_row(row: Array, *, best: np.float32, temperature: np.float32) -> Array:
    """(row - best) / temperature, float32, in a new array; its maximum is exactly 0, its minimum may be -inf."""
    scaled: Array = row - best
    with np.errstate(over="ignore"):
        scaled /= temperature
    return scaled


def surviving_ids(scaled: Array, *, top_k: int, top_p: float, min_p: float, floor: float) -> Array:
    """Ids that may be drawn, int64, in no particular order; at least the best one.

    Args:
        scaled: of `scaled_row`.
        top_k: 0 = off.
        top_p: 1 = off.
        min_p: 0 = off; relative to the best id's probability.
        floor: ids whose value is below it cannot be drawn whatever their noise; -inf keeps all.
    """
    if min_p > 0:
        floor = max(floor, float(np.log(np.float64(min_p))))
    lowest = np.float32(floor)
    if top_k == 0 and top_p >= 1:
        return np.flatnonzero(scaled >= lowest)
    ranked = best_values(scaled, top_k) if top_k else None
    if top_p < 1:
        ranked = _nucleus_of_row(scaled, top_p) if ranked is None else _nucleus(ranked, top_p, total=_mass(ranked))
    assert ranked is not None
    ids = _ids_of_best(scaled, ranked)
    return ids[scaled[ids] >= lowest]


def ranked_ids(values: Array, count: int) -> Array:
    """[min(count, len(values))] int64: ids of the largest values, best first, ties by lowest id."""
    ids = np.sort(_ids_of_best(values, best_values(values, count)))
    return ids[np.argsort(-values[ids], kind="stable")]


def best_values(values: Array, count: int) -> Array:
    """[min(count, len(values))] float32: the largest values, best first."""
    if count <= min(_FEW, len(values)):
        return torch.topk(torch.from_numpy(values), count).values.numpy()
    return np.sort(values)[::-1][:count]


def _ids_of_best(values: Array, ranked: Array) -> Array:
    """Ids that have the values `ranked`, the best of `values`; of equal ones at the border the lowest."""
    border = ranked[-1]
    above = np.flatnonzero(values > border)
    at_border = np.flatnonzero(values == border)
    return np.concatenate([above, at_border[: len(ranked) - len(above)]])


def _nucleus_of_row(scaled: Array, top_p: float) -> Array:
    """Values of the whole row's nucleus, best first; the row is sorted only where a few values hold too little mass."""
    total = _mass(scaled)
    for count in (_FEW, len(scaled)):
        ranked = best_values(scaled, count)
        nucleus = _nucleus(ranked, top_p, total=total)
        if len(nucleus) < len(ranked):
            return nucleus
    return ranked


def _nucleus(ranked: Array, top_p: float, *, total: np.float64) -> Array:
    """The shortest prefix of `ranked` that holds `top_p` of the mass; the value that crosses is in."""
    before = np.zeros(len(ranked), np.float64)
    np.cumsum(np.exp(ranked[:-1]), dtype=np.float64, out=before[1:])
    return ranked[: np.searchsorted(before, top_p * total, side="left")]


def _mass(values: Array) -> np.float64:
    return np.exp(values).sum(dtype=np.float64)
