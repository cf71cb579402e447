"""The bucket sizes that pad least for the forwards that were seen. Pure arithmetic: knows neither metrics nor files.

A forward of n rows or tokens runs in the smallest bucket that holds it. Wanted are at most N sizes, over all phases
together, with the least padding: for one phase an optimal split of the sorted sizes, by dynamic programming, then the
best division of N between the phases. The result is exact.

A forward for which only a bucket above twice its tokens is there runs eagerly; it counts here as if it were padded, so
that no list looks good because it replays little.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from protos.wire.buckets import pads_too_much
from protos.wire.enums import GraphPhase

Histogram = Mapping[int, int]
"""How many forwards had so many rows (decode) or tokens (prefill)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A list of buckets, and what it does to a histogram."""

    buckets: tuple[int, ...]
    padded: int
    """Tokens computed for nothing."""
    replayed: int
    """Forwards that find a bucket; the others run eagerly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseAdvice:
    """Of one phase."""

    phase: GraphPhase
    forwards: int
    real: int
    """Tokens that were asked for."""
    now: Fit
    advised: Fit

    @property
    def saved(self) -> int:
        """Tokens that the advised list does not compute and the present one does."""
        return self.now.padded - self.advised.padded


@dataclass(frozen=True, slots=True)
class _Choices:
    """Of one phase: the best list of each length, shortest first."""

    costs: list[int]
    lists: list[tuple[int, ...]]


def advise(
    observed: Mapping[GraphPhase, Histogram],
    *,
    now: Mapping[GraphPhase, Sequence[int]],
    limits: Mapping[GraphPhase, int],
    max_graphs: int,
) -> tuple[PhaseAdvice, ...]:
    """The best lists of at most `max_graphs` sizes together, beside the present ones.

    Args:
        observed: by phase; phases without forwards get no buckets.
        now: ascending lists to compare with, for every observed phase.
        limits: the largest size to capture, for every observed phase; larger forwards stay eager.
        max_graphs: not below the number of phases that have forwards.
    """
    coverable = {
        phase: {size: count for size, count in found.items() if count and size <= limits[phase]}
        for phase, found in observed.items()
    }
    phases = sorted(phase for phase, found in coverable.items() if found)
    assert max_graphs >= len(phases), "every phase needs a graph"
    lists = _shared_out({phase: _choices(coverable[phase], most=max_graphs) for phase in phases}, max_graphs)
    return tuple(
        PhaseAdvice(
            phase=phase,
            forwards=sum(observed[phase].values()),
            real=sum(size * count for size, count in observed[phase].items()),
            now=fit(phase, observed[phase], now[phase]),
            advised=fit(phase, observed[phase], lists[phase]),
        )
        for phase in phases
    )


def fit(phase: GraphPhase, histogram: Histogram, buckets: Sequence[int]) -> Fit:
    """What ascending `buckets` do to a histogram; forwards beyond the last run eagerly, unpadded."""
    padded = replayed = 0
    for size, count in histogram.items():
        index = bisect_left(buckets, size)
        if index == len(buckets):
            continue
        padded += count * (buckets[index] - size)
        if phase is not GraphPhase.PREFILL or not pads_too_much(buckets[index], size):
            replayed += count
    return Fit(buckets=tuple(buckets), padded=padded, replayed=replayed)


def _choices(histogram: Histogram, *, most: int) -> _Choices:
    """The list of each length up to `most` that pads the histogram least. Its largest size is in all of them."""
    sizes = np.array(sorted(histogram), np.int64)
    counts = np.array([histogram[size] for size in sizes.tolist()], np.int64)
    forwards = np.concatenate(([0], np.cumsum(counts)))
    tokens = np.concatenate(([0], np.cumsum(counts * sizes)))
    # best[j]: least padding of the sizes up to j with a bucket at j, and so many buckets in all.
    best = sizes * forwards[1:] - tokens[1:]
    cuts: list[np.ndarray] = []
    found = _Choices([int(best[-1])], [(int(sizes[-1]),)])
    for _ in range(1, min(most, len(sizes))):
        came = np.full(len(sizes), -1)
        row = best.copy()
        for last in range(1, len(sizes)):
            # The bucket before the one at `last` is at `cut`: what lies between goes up to the size at `last`.
            between = sizes[last] * (forwards[last + 1] - forwards[1 : last + 1])
            costs = best[:last] + between - (tokens[last + 1] - tokens[1 : last + 1])
            cut = int(np.argmin(costs))
            if costs[cut] < row[last]:
                row[last], came[last] = costs[cut], cut
        best = row
        cuts.append(came)
        found.costs.append(int(best[-1]))
        found.lists.append(_walked(sizes, cuts))
    return found


def _walked(sizes: np.ndarray, cuts: Sequence[np.ndarray]) -> tuple[int, ...]:
    last = len(sizes) - 1
    chosen = [int(sizes[last])]
    for came in reversed(cuts):
        if came[last] >= 0:
            last = int(came[last])
            chosen.append(int(sizes[last]))
    return tuple(reversed(chosen))


def _shared_out(choices: Mapping[GraphPhase, _Choices], max_graphs: int) -> dict[GraphPhase, tuple[int, ...]]:
    """The list of each phase so that the padding of all is least; of equal ones, the fewest graphs."""
    if not choices:
        return {}
    lists = product(*(zip(found.costs, found.lists, strict=True) for found in choices.values()))
    possible = (chosen for chosen in lists if _num_graphs(chosen) <= max_graphs)
    best = min(possible, key=lambda chosen: (sum(cost for cost, _ in chosen), _num_graphs(chosen)))
    return {phase: sizes for phase, (_, sizes) in zip(choices, best, strict=True)}


def _num_graphs(chosen: Sequence[tuple[int, tuple[int, ...]]]) -> int:
    return sum(len(sizes) for _, sizes in chosen)
