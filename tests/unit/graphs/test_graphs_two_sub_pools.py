"""Gemma 3's architecture on captured graphs, in both sub-pools: buckets in any order, sizes at and beside them."""

import pytest
import torch

from tests.support.forwards import ForwardDriver
from tests.support.mixed_graph_steps import BACKENDS, ROOM, assert_replays_equal_eager_steps
from tests.support.tiny_llama import Shape, tiny_folder

SHAPE = Shape(architecture="gemma3", window=32, full_every=2, hidden_size=64, intermediate_size=64, num_layers=2)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A tiny model of the architecture, and rows in its pools: two longer than its window of 32 tokens."""
    torch.set_num_threads(1)
    driver = ForwardDriver(tiny_folder(tmp_path_factory.mktemp("gemma"), SHAPE), num_pages=128)
    assert len(driver.pools) == 2
    lengths = [100, 3, 40, 9]
    rows = [
        driver.row([(100 + 37 * row + 11 * place) % 250 for place in range(length + ROOM)])
        for row, length in enumerate(lengths)
    ]
    driver.step(rows[:1], lengths[:1])
    driver.step(rows[1:], lengths[1:])
    return driver, rows


@pytest.mark.parametrize("backends", BACKENDS, ids="-".join)
def test_replays_in_both_sub_pools_equal_eager_steps_bit_for_bit(gemma, backends):
    assert_replays_equal_eager_steps(*gemma, backends)
