"""Which ids of one row may be drawn: top-k, then top-p, then min-p. One row at a time.

Ids rank by value, best first, ties by lowest id. A row is worked on alone, in arrays of its own, so that nothing of its
batch-mates (count, filters, place in the batch) can change a bit of its result.
"""

import numpy as np

Array = np.ndarray

_GROUPS_PER_ID = 8
_LEAST_DEPTH = 3
"""With fewer values a group, sorting all of them is as fast."""
_NUCLEUS_STEPS = (256, 2048)
"""Best values among which a nucleus is looked for before the whole row is sorted."""


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
    if top_k:
        ids = ranked_ids(scaled, top_k)
        if top_p < 1:
            ids = ids[: _nucleus_size(scaled[ids], top_p, total=_mass(scaled[ids]))]
    else:
        ids = _nucleus_of_row(scaled, top_p)
    return ids[scaled[ids] >= lowest]


def ranked_ids(values: Array, count: int) -> Array:
    """[min(count, len(values))] int64: ids of the largest values, best first, ties by lowest id. No NaN."""
    bound = _lower_bound(values, count)
    ids = np.flatnonzero(values >= bound if bound > -np.inf else values > bound)
    ids = ids[np.argsort(-values[ids], kind="stable")][:count]
    missing = min(count, len(values)) - len(ids)
    return ids if missing == 0 else np.concatenate([ids, np.flatnonzero(values == bound)[:missing]])


def _lower_bound(values: Array, count: int) -> np.float32:
    """A number that at least `count` of `values` reach, and few more; -inf if that many are hard to tell apart.

    Values are dealt out to groups: the count-th largest of the groups' maxima has `count` values at or above it.
    """
    num_groups = _GROUPS_PER_ID * count
    depth = len(values) // num_groups
    if depth < _LEAST_DEPTH:
        return np.float32(-np.inf)
    best = values[: depth * num_groups].reshape(depth, num_groups).max(axis=0)
    bound: np.float32 = np.partition(best, num_groups - count)[num_groups - count]
    return bound


def _nucleus_of_row(scaled: Array, top_p: float) -> Array:
    """Ids of the whole row's nucleus, best first; the row is sorted only where a few values hold too little mass."""
    total = _mass(scaled)
    for count in _NUCLEUS_STEPS:
        if count < len(scaled):
            ids = ranked_ids(scaled, count)
            size = _nucleus_size(scaled[ids], top_p, total=total)
            if size < count:
                return ids[:size]
    ids = ranked_ids(scaled, len(scaled))
    return ids[: _nucleus_size(scaled[ids], top_p, total=total)]


def _nucleus_size(ranked: Array, top_p: float, *, total: np.float64) -> int:
    """Length of the shortest prefix of `ranked` that holds `top_p` of the mass; the value that crosses is in."""
    before = np.zeros(len(ranked), np.float64)
    np.cumsum(np.exp(ranked[:-1]), dtype=np.float64, out=before[1:])
    return int(np.searchsorted(before, top_p * total, side="left"))


def _mass(values: Array) -> np.float64:
    return np.exp(values).sum(dtype=np.float64)
