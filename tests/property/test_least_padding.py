"""The advised buckets pad least of all lists: compared with every list there is, and with whatever else is proposed."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from protos.client.bucket_advice import advise, fit
from protos.wire.enums import GraphPhase

PHASES = (GraphPhase.DECODE, GraphPhase.PREFILL)
HISTOGRAMS = st.dictionaries(st.integers(1, 40), st.integers(1, 30), min_size=1, max_size=6)


def every_list(histogram):
    """All lists of observed sizes that hold the largest; a bucket at another size pads more."""
    *others, largest = sorted(histogram)
    for count in range(len(others) + 1):
        for chosen in combinations(others, count):
            yield (*chosen, largest)


def brute_force(observed, *, max_graphs):
    def least(phases, left):
        if not phases:
            return 0
        phase, *rest = phases
        return min(
            fit(phase, observed[phase], sizes).padded + least(rest, left - len(sizes))
            for sizes in every_list(observed[phase])
            if len(sizes) + len(rest) <= left
        )

    return least(list(observed), max_graphs)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(PHASES), HISTOGRAMS, min_size=1), st.integers(2, 9))
def test_no_other_lists_of_so_many_graphs_pad_less(observed, max_graphs):
    limits = {phase: max(found) for phase, found in observed.items()}
    now = {phase: (limits[phase],) for phase in observed}
    advices = advise(observed, now=now, limits=limits, max_graphs=max_graphs)
    assert sum(advice.advised.padded for advice in advices) == brute_force(observed, max_graphs=max_graphs)
    assert sum(len(advice.advised.buckets) for advice in advices) <= max_graphs
    for advice in advices:
        assert list(advice.advised.buckets) == sorted(set(advice.advised.buckets))
        assert advice.advised.buckets[-1] == limits[advice.phase]


@settings(max_examples=60, deadline=None)
@given(HISTOGRAMS, st.sets(st.integers(1, 60), min_size=1, max_size=6))
def test_it_pads_no_more_than_any_list_that_holds_the_same_forwards(histogram, proposed):
    sizes = tuple(sorted({*proposed, 60}))
    (advice,) = advise(
        {GraphPhase.PREFILL: histogram},
        now={GraphPhase.PREFILL: sizes},
        limits={GraphPhase.PREFILL: 60},
        max_graphs=len(sizes),
    )
    assert advice.saved >= 0
    assert advice.advised.replayed >= 0
    assert advice.real == sum(size * count for size, count in histogram.items())
