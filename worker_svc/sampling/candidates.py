"""Which ids of one row may be drawn: top-k, then top-p, then min-p. One row at a time.

Ids are ranked by value, best first, ties by lowest id. A row is worked on alone, in arrays of its own, so that nothing
of its batch-mates (count, filters, place in the batch) can change a bit of its result.
"""

import numpy as np
import torch

Array = np.ndarray

_FIRST_NUCLEUS = 256
_NUCLEUS_GROWTH = 8


def scaled_row(row: Array, *, best: np.float32, temperature: np.float32) -> Array:
    """(row - best) / temperature, float32, in a new array; its maximum is exactly 0, its minimum may be -inf."""
    scaled: Array = row - best
    with np.errstate(over="ignore"):
        scaled /= temperature
    return scaled


def ranked_ids(values: Array, count: int) -> Array:
    """[min(count, len(values))] int64: ids of the largest values, best first, ties by lowest id."""
    width = len(values)
    if count >= width:
        ids = np.arange(width)
    else:
        # Only the value at the border is taken from topk: which of several equal ids it names is unspecified.
        border = torch.topk(torch.from_numpy(values), count).values[-1].item()
        ids = np.flatnonzero(values >= np.float32(border))
    return ids[np.argsort(-values[ids], kind="stable")[:count]]


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
    ids = ranked_ids(scaled, top_k) if top_k else None
    if top_p < 1:
        ids = _nucleus_of(scaled[ids], ids=ids, top_p=top_p) if ids is not None else _nucleus(scaled, top_p)
    assert ids is not None
    return ids[scaled[ids] >= lowest]


def _nucleus(scaled: Array, top_p: float) -> Array:
    """Nucleus of the whole row, ranked in growing prefixes: a full sort only where the mass needs it."""
    total = np.exp(scaled).sum(dtype=np.float64)
    count = _FIRST_NUCLEUS
    while True:
        ids = ranked_ids(scaled, count)
        before = _mass_before(scaled[ids])
        if count >= len(scaled) or before[-1] >= top_p * total:
            return ids[before < top_p * total]
        count *= _NUCLEUS_GROWTH


def _nucleus_of(ranked: Array, *, ids: Array, top_p: float) -> Array:
    """Nucleus of ids that are ranked already; the mass is theirs alone."""
    total = np.exp(ranked).sum(dtype=np.float64)
    return ids[_mass_before(ranked) < top_p * total]


def _mass_before(ranked: Array) -> Array:
    """Probability mass, not normalised, of the ids ranked before each one; the first has 0."""
    before = np.zeros(len(ranked), np.float64)
    np.cumsum(np.exp(ranked[:-1]), dtype=np.float64, out=before[1:])
    return before
