"""Gemma 3's architecture on captured graphs, in both sub-pools: buckets in any order, sizes at and beside them."""

import pytest
import torch

from protos.wire.buckets import choose_bucket
from protos.wire.enums import ForwardMode, GraphPhase, GraphRefusal
from protos.wire.plan import GraphChoice
from protos.wire.worker_info import Buckets
from tests.support.forwards import ForwardDriver
from tests.support.graph_bench import GraphBench, same
from tests.support.tiny_llama import Shape, tiny_folder

DECODE, PREFILL, SLOTS = (1, 2, 4), (16, 32), 4
STEPS = (
    ("decode", [1] * 4),
    ("prefill", [17]),
    ("decode", [1]),
    ("decode", [1] * 2),
    ("prefill", [10, 5]),
    ("decode", [1] * 3),
    ("prefill", [1, 20, 1, 9]),
    ("decode", [1] * 4),
    ("prefill", [16]),
    ("decode", [1]),
    ("prefill", [2, 30]),
)
"""Every bucket after every other, sizes at a bucket and one to either side of it."""
BEYOND = (("prefill", [33], GraphRefusal.OVER_MAX_TOKENS), ("decode", [1] * 5, GraphRefusal.OVER_MAX_ROWS))


SHAPE = Shape(architecture="gemma3", window=32, full_every=2, hidden_size=64, intermediate_size=64, num_layers=2)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A tiny model of the architecture, and rows in its pools: two longer than its window of 32 tokens."""
    torch.set_num_threads(1)
    driver = ForwardDriver(tiny_folder(tmp_path_factory.mktemp("gemma"), SHAPE), num_pages=128)
    assert len(driver.pools) == 2
    lengths = [100, 3, 40, 9]
    rows = [
        driver.row([(100 + 37 * row + 11 * place) % 250 for place in range(length + 150)])
        for row, length in enumerate(lengths)
    ]
    driver.step(rows[:1], lengths[:1])
    driver.step(rows[1:], lengths[1:])
    return driver, rows


def chosen(phase, lens):
    """The bucket that a scheduler would name."""
    mode = ForwardMode.DECODE if phase == "decode" else ForwardMode.EXTEND
    live = (
        Buckets(phase=GraphPhase.DECODE, sizes=DECODE, live=DECODE, slots=0),
        Buckets(phase=GraphPhase.PREFILL, sizes=PREFILL, live=PREFILL, slots=SLOTS),
    )
    return choose_bucket(live, mode=mode, num_rows=len(lens), num_tokens=sum(lens))


@pytest.mark.parametrize("backends", [("full", "breakable"), ("breakable", "full")], ids="-".join)
def test_replays_in_both_sub_pools_equal_eager_steps_bit_for_bit(gemma, backends):
    driver, rows = gemma
    bench = GraphBench(driver=driver, backends=backends, decode=DECODE, prefill=PREFILL, slots=SLOTS)
    bench.capture()
    used = []
    for number, (phase, lens) in enumerate(STEPS):
        choice = chosen(phase, lens)
        assert isinstance(choice, GraphChoice)
        used.append(choice.bucket)
        group = [rows[(number + index) % 4] for index in range(len(lens))]
        batch = bench.batch(group, lens, bucket=choice.bucket)
        known = bench.eager(batch)
        bench.buffers.poison(number + 1)
        assert same(bench.replay(batch), known)
        for row, length in zip(group, lens, strict=True):
            row.kv_len += length
    assert set(used) == {*DECODE, *PREFILL}
    assert all(chosen(phase, lens) is reason for phase, lens, reason in BEYOND)
