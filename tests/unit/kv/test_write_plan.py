import numpy as np
import pytest
import torch

from protos.wire.plan import WriteWindow
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.token_to_kv_pool import KVGeometry
from worker_svc.kv.write_plan import WritePlan, window_index

STARTS = np.array([0, 3, 4, 8])
"""Rows of 3, 1 and 4 tokens."""
PLACES = {0: (np.arange(8) + 1, np.zeros(8, np.int64)), 1: (np.arange(8) + 20, np.full(8, 2))}


class Pages:
    def __init__(self, page_size):
        self.geometry = KVGeometry(
            num_pages=100, page_size=page_size, num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32
        )


@pytest.fixture
def asked():
    return []


@pytest.fixture
def plan(asked):
    def places(sub_pool):
        asked.append(sub_pool)
        return PLACES[sub_pool]

    return WritePlan(IndexTranslator((Pages(16), Pages(4))), places)


def bound(plan, window, rows=slice(0, 3)):
    return plan.bind(0, window_index(window, rows=rows, starts=STARTS)).tolist()


def test_each_sub_pool_is_translated_once_and_only_when_asked(plan, asked):
    assert asked == []
    full, window = plan.slots(0), plan.slots(1)
    assert asked == [0, 1]
    assert plan.slots(0) is full
    assert plan.slots(1) is window
    plan.bind(0, slice(0, 4))
    assert asked == [0, 1]
    assert full.tolist() == [16 * page for page in range(1, 9)]
    assert window.tolist() == [4 * page + 2 for page in range(20, 28)]


def test_the_translation_cannot_be_changed_and_what_is_bound_is_a_copy(plan):
    with pytest.raises(ValueError, match="read-only"):
        plan.slots(0)[0] = 1
    mine = plan.bind(0, slice(0, 8))
    mine[:] = 7
    assert plan.slots(0)[0] == 16


def test_two_plans_share_nothing(asked):
    plans = [WritePlan(IndexTranslator((Pages(16),)), lambda sub_pool: PLACES[sub_pool]) for _ in range(2)]
    assert plans[0].slots(0) is not plans[1].slots(0)


@pytest.mark.parametrize(
    ("window", "rows", "slots"),
    [
        (None, slice(0, 3), [16, 32, 48, 64, 80, 96, 112, 128]),
        (None, slice(1, 3), [64, 80, 96, 112, 128]),
        (WriteWindow(columns=(1, 3)), slice(0, 3), [0, 32, 48, 0, 0, 96, 112, 0]),
        (WriteWindow(columns=(0, 1)), slice(1, 3), [64, 80, 0, 0, 0]),
        (WriteWindow(run=(2, 5)), slice(0, 3), [0, 0, 48, 64, 80, 0, 0, 0]),
        (WriteWindow(run=(2, 5)), slice(2, 3), [80, 0, 0, 0]),
        (WriteWindow(flat_index=np.array([7, 0], np.uint32)), slice(0, 3), [16, 0, 0, 0, 0, 0, 0, 128]),
        (WriteWindow(flat_index=np.array([], np.uint32)), slice(0, 3), [0] * 8),
    ],
)
def test_windows_name_what_is_written_and_the_rest_goes_to_the_sink(plan, window, rows, slots):
    assert bound(plan, window, rows) == slots


def test_a_flat_index_of_minus_one_is_the_sink_and_may_have_lanes_past_the_batch(plan):
    assert plan.bind(0, np.array([3, -1, 0, -1, -1])).tolist() == [64, 0, 16, 0, 0]


def test_windows_of_a_partition_together_write_everything_once(plan):
    parts = [bound(plan, WriteWindow(run=span)) for span in ((0, 2), (2, 3), (3, 8))]
    assert np.sum(parts, axis=0).tolist() == plan.slots(0).tolist()
