"""What a list of buckets does to forwards, and the advice on small examples that can be done by hand."""

import json
from pathlib import Path

import pytest

from protos.client.bucket_advice import advise, fit
from protos.wire.bucket_lists import default_sizes
from protos.wire.buckets import choose_bucket
from protos.wire.enums import ForwardMode, GraphPhase
from protos.wire.plan import GraphChoice
from protos.wire.worker_info import Buckets

DECODE, PREFILL = GraphPhase.DECODE, GraphPhase.PREFILL
TRACES = json.loads((Path(__file__).parents[2] / "golden" / "bucket_traces.json").read_text())["traces"]


def test_padding_is_counted_up_to_the_largest_bucket():
    found = fit(DECODE, {1: 10, 3: 2, 9: 5}, (2, 4, 8))
    assert (found.padded, found.replayed) == (10 * 1 + 2 * 1, 12)


def test_a_prefill_bucket_above_twice_its_tokens_replays_nothing_and_still_counts_as_padding():
    assert fit(PREFILL, {7: 1, 8: 1}, (16,)).replayed == 1
    assert fit(PREFILL, {7: 1, 8: 1}, (16,)).padded == 9 + 8
    assert fit(DECODE, {7: 1, 8: 1}, (16,)).replayed == 2


def test_one_graph_is_the_largest_size_and_more_than_there_are_sizes_pad_nothing():
    histogram = {3: 5, 5: 1, 8: 2}
    for count, wanted in ((1, (8,)), (2, (3, 8)), (3, (3, 5, 8)), (9, (3, 5, 8))):
        (advice,) = advise({DECODE: histogram}, now={DECODE: (8,)}, limits={DECODE: 8}, max_graphs=count)
        assert advice.advised.buckets == wanted
    assert advice.advised.padded == 0
    assert (advice.now.padded, advice.saved) == (5 * 5 + 3, 28)


def test_graphs_go_to_the_phase_that_saves_more():
    observed = {DECODE: {1: 1, 2: 1}, PREFILL: {10: 100, 100: 100, 200: 1}}
    decode, prefill = advise(
        observed, now={DECODE: (2,), PREFILL: (200,)}, limits={DECODE: 2, PREFILL: 200}, max_graphs=4
    )
    assert (decode.advised.buckets, prefill.advised.buckets) == ((2,), (10, 100, 200))


def test_forwards_beyond_the_limit_stay_eager():
    (advice,) = advise({PREFILL: {16: 3, 500: 2}}, now={PREFILL: (32,)}, limits={PREFILL: 256}, max_graphs=4)
    assert advice.advised.buckets == (16,)
    assert (advice.forwards, advice.advised.replayed, advice.real) == (5, 3, 1048)


def worker_padding(phase, histogram, sizes):
    """(padded, replays) by the function that schedulers choose buckets with."""
    buckets = [Buckets(phase=phase, sizes=sizes, live=sizes, slots=1)]
    mode = ForwardMode.DECODE if phase is DECODE else ForwardMode.EXTEND
    padded = replays = 0
    for size, count in histogram.items():
        num_rows, num_tokens = (size, size) if phase is DECODE else (1, size)
        choice = choose_bucket(buckets, mode=mode, num_rows=num_rows, num_tokens=num_tokens)
        if isinstance(choice, GraphChoice):
            padded += count * (choice.bucket - size)
            replays += count
    return padded, replays


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("name", sorted(TRACES))
def test_on_recorded_traces_it_pads_less_than_the_default_buckets_at_equal_graph_count(name, device):
    observed = {
        GraphPhase[phase.upper()]: {int(size): count for size, count in found.items()}
        for phase, found in TRACES[name]["forwards"].items()
    }
    now = {phase: default_sizes(phase, limit=256 if phase is DECODE else 2048, device=device) for phase in observed}
    limits = {phase: sizes[-1] for phase, sizes in now.items()}
    max_graphs = sum(map(len, now.values()))
    advices = advise(observed, now=now, limits=limits, max_graphs=max_graphs)
    assert sum(len(advice.advised.buckets) for advice in advices) <= max_graphs
    before = [worker_padding(advice.phase, observed[advice.phase], advice.now.buckets) for advice in advices]
    after = [worker_padding(advice.phase, observed[advice.phase], advice.advised.buckets) for advice in advices]
    assert sum(padded for padded, _ in after) < sum(padded for padded, _ in before)
    assert sum(replays for _, replays in after) >= sum(replays for _, replays in before)
