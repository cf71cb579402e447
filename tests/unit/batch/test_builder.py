import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from protos.wire.enums import GraphRefusal, HiddenMode
from protos.wire.plan import Forward, LogprobColumns, SamplingColumns, WriteWindow
from tests.support import plans
from tests.support.batch_content import content, storages
from worker_svc.batch.builder import BatchBuilder
from worker_svc.batch.forward_batch import ForwardBatch

VECTORS = json.loads((Path(__file__).parents[2] / "golden" / "execution_vectors.json").read_text())


class FlatTranslator:
    """Page p of a sub-pool starts at slot p * page_size; counts its calls."""

    def __init__(self, page_sizes):
        self.page_sizes = page_sizes
        self.calls = []

    def slots(self, sub_pool, pages, offsets):
        self.calls.append(sub_pool)
        return pages * self.page_sizes[sub_pool] + offsets


def build(plan, page_sizes=(16,)):
    builder = BatchBuilder(translator=FlatTranslator(page_sizes), page_sizes=page_sizes, device=torch.device("cpu"))
    batches = builder.build(plan)
    for batch in batches:
        batch.check()
    return batches


def columns_of(plan):
    return [plan.rows.seq_lens, plan.rows.extend_lens, plan.tokens.ids, plan.page_tables[0].indices]


def test_a_mixed_plan():
    plan = plans.make_mixed_plan()
    (batch,) = build(plan)
    assert (batch.num_reqs, batch.num_tokens) == (4, 27)
    assert batch.graph is GraphRefusal.DISABLED
    assert batch.input_ids.tolist() == plan.tokens.ids.tolist()
    assert batch.positions.tolist() == [20, 33, *range(16, 32), *range(9)]
    assert batch.seq_lens.tolist() == [21, 34, 32, 9]
    assert batch.last_token_rows.tolist() == [0, 1, 17, 26]
    assert batch.logits_rows.tolist() == [0, 1, 26]
    assert batch.sampling.rows.tolist() == [0, 1, 3]
    assert batch.sampling.positions.tolist() == [20, 33, 8]
    assert batch.extend.extend_start_loc.tolist() == [0, 1, 2, 18]
    assert batch.query_lens_host().tolist() == [1, 1, 16, 9]
    assert batch.logprobs is None


def test_slots_are_those_of_the_page_table():
    plan = plans.make_plan([plans.decode(20, pages=[7, 3]), plans.extend(15, 3, pages=[9, 5])])
    (batch,) = build(plan)
    (pages,) = batch.page_groups
    assert pages.out_cache_loc.tolist() == [3 * 16 + 4, 9 * 16 + 15, 5 * 16, 5 * 16 + 1]
    assert pages.kv_indptr.tolist() == [0, 2, 4]
    assert pages.kv_indices.tolist() == [7, 3, 9, 5]
    assert pages.kv_last_page_len.tolist() == [5, 2]


def test_a_window_sub_pool_counts_from_its_first_listed_page():
    info = plans.make_info(sub_pools=(plans.full_sub_pool(), plans.window_sub_pool(window_tokens=32)))
    plan = plans.make_plan([plans.decode(100), plans.extend(0, 5)], info=info)
    (batch,) = build(plan, page_sizes=(16, 16))
    window = batch.page_groups[1]
    first_page = (100 - 32) // 16
    assert window.start_positions_host.tolist() == [first_page * 16, 0]
    page = plan.page_tables[1].indices[100 // 16 - first_page]
    assert window.out_cache_loc[0] == page * 16 + 100 % 16


def test_slots_are_translated_once_per_sub_pool_whatever_the_forwards():
    rows = [plans.decode(20), plans.decode(33), plans.extend(0, 9)]
    info = plans.make_info(sub_pools=(plans.full_sub_pool(), plans.window_sub_pool()))
    forwards = [plans.whole_forward(rows[:2]), plans.whole_forward(rows[2:], row_begin=2, row_end=3)]
    plan = plans.make_plan(rows, forwards=forwards, info=info)
    translator = FlatTranslator((16, 16))
    BatchBuilder(translator=translator, page_sizes=(16, 16), device=torch.device("cpu")).build(plan)
    assert translator.calls == [0, 1]


def test_forwards_split_rows_as_their_own_plans_would():
    rows = [plans.decode(20), plans.decode(33), plans.extend(16, 16, samples=0), plans.extend(0, 9)]
    forwards = [plans.whole_forward(rows[:2]), plans.whole_forward(rows[2:], row_begin=2, row_end=4)]
    plan = plans.make_plan(rows, forwards=forwards)
    decode, extend = build(plan)
    assert decode.extend is None
    assert decode.positions.tolist() == [20, 33]
    assert extend.positions.tolist() == [*range(16, 32), *range(9)]
    assert extend.last_token_rows.tolist() == [15, 24]
    assert extend.logits_rows.tolist() == [24]
    assert extend.sampling.rows.tolist() == [1]
    (whole,) = build(replace(plan, forwards=(plans.whole_forward(rows),)))
    slots = whole.page_groups[0].out_cache_loc.tolist()
    assert decode.page_groups[0].out_cache_loc.tolist() + extend.page_groups[0].out_cache_loc.tolist() == slots
    assert extend.page_groups[0].kv_indptr.tolist() == [0, 2, 3]


def test_idle_is_empty_and_well_formed():
    (batch,) = build(plans.make_idle_plan())
    assert (batch.num_reqs, batch.num_tokens, batch.num_logits) == (0, 0, 0)
    assert batch.sampling is None


def test_building_twice_shares_no_storage_and_leaves_the_plan_alone():
    plan = plans.make_mixed_plan(
        sampling=SamplingColumns(temperatures=plans.f32(1, 0, 0, 1), seeds=plans.u64(1, 2, 3, 4)),
        logprobs=LogprobColumns(output_wanted=plans.u8(1, 0, 0, 1)),
    )
    before = [column.copy() for column in columns_of(plan)]
    (first,), (second,) = build(plan), build(plan)
    assert content(first) == content(second)
    mine, theirs = storages(first), storages(second)
    plan_addresses = storages(plan)
    assert len(mine) > 25
    assert len(set(mine)) == len(mine)
    assert not set(mine) & (set(theirs) | set(plan_addresses))
    first.input_ids.zero_()
    first.page_groups[0].kv_indices.zero_()
    for column, copy in zip(columns_of(plan), before, strict=True):
        np.testing.assert_array_equal(column, copy)


def test_host_copies_are_read_only():
    (batch,) = build(plans.make_mixed_plan())
    for host in (batch.seq_lens_host, batch.extend.extend_lens_host, batch.sampling.seeds):
        with pytest.raises(ValueError, match="read-only"):
            host[0] = 1


def test_absent_sampling_columns_are_neutral_and_no_seeds_means_greedy():
    sampling = SamplingColumns(temperatures=plans.f32(1, 1), top_ps=plans.f32(0.5, 1))
    (batch,) = build(plans.make_decode_plan(2, sampling=sampling))
    assert batch.sampling.temperatures.tolist() == [0, 0]
    assert batch.sampling.top_ps.tolist() == [0.5, 1]
    assert batch.sampling.min_ps.tolist() == [0, 0]
    assert batch.sampling.top_ks.tolist() == [0, 0]


def test_sampling_and_logprobs_follow_the_rows_that_sample():
    plan = plans.make_mixed_plan(
        sampling=SamplingColumns(temperatures=plans.f32(1, 2, 3, 4), seeds=plans.u64(1, 2, 3, 2**64 - 1)),
        logprobs=LogprobColumns(output_wanted=plans.u8(0, 1, 1, 0), output_top_counts=plans.u8(0, 0, 3, 2)),
    )
    (batch,) = build(plan)
    assert batch.sampling.temperatures.tolist() == [1, 2, 4]
    assert batch.sampling.seeds.tolist() == [1, 2, 2**64 - 1]
    assert batch.logprobs.wanted.tolist() == [False, True, False]
    assert batch.logprobs.top_counts.tolist() == [0, 0, 2]


def test_a_relabelled_decode_keeps_its_logical_mode():
    rows = [plans.decode(20), plans.decode(33)]
    decode = plans.fitting_mode(rows)
    extend = plans.fitting_mode([plans.extend(0, 2)])
    forward = Forward(mode=extend, logical_mode=decode, row_begin=0, row_end=2, graph=GraphRefusal.DISABLED)
    (batch,) = build(plans.make_plan(rows, forwards=[forward]))
    assert (batch.forward_mode, batch.logical_mode) == (extend, decode)
    assert batch.positions.tolist() == [20, 33]


@pytest.mark.parametrize("case", VECTORS["extend"])
def test_extend_vectors_through_the_builder(case):
    rows = [
        plans.extend(cached, length) for cached, length in zip(case["prefix_lens"], case["extend_lens"], strict=True)
    ]
    (batch,) = build(plans.make_plan(rows, mode=plans.fitting_mode([plans.extend(0, 2)])))
    assert batch.positions.tolist() == case["positions"]
    assert batch.extend.extend_start_loc.tolist() == case["extend_start_loc"]
    assert batch.seq_lens.tolist() == case["seq_lens"]


def test_every_forward_of_a_plan_binds_the_same_write_plan():
    rows = [plans.decode(20), plans.decode(33), plans.extend(0, 9)]
    forwards = [plans.whole_forward(rows[:2]), plans.whole_forward(rows[2:], row_begin=2, row_end=3)]
    decode, extend = build(plans.make_plan(rows, forwards=forwards))
    assert decode.write_plan is extend.write_plan is not None
    slots = decode.write_plan.slots(0)
    assert slots[:2].tolist() == decode.page_groups[0].out_cache_loc.tolist()
    assert slots[2:].tolist() == extend.page_groups[0].out_cache_loc.tolist()


def test_a_write_window_sends_the_other_tokens_to_the_sink():
    plan = plans.make_plan([plans.extend(0, 3), plans.extend(0, 4)])
    (whole,) = build(plan)
    (part,) = build(replace(plan, forwards=(replace(plan.forwards[0], write_window=WriteWindow(columns=(1, 3))),)))
    slots = whole.page_groups[0].out_cache_loc.tolist()
    assert part.page_groups[0].out_cache_loc.tolist() == [0, *slots[1:3], 0, *slots[4:6], 0]


def test_hidden_states_that_rows_return_are_a_group():
    plan = plans.make_mixed_plan()
    (batch,) = build(replace(plan, rows=replace(plan.rows, hidden_modes=plans.u8(1, 2, 3, 1))))
    assert batch.hidden.modes.tolist() == [1, 2, 3, 1]
    assert batch.hidden.mode is HiddenMode.FULL
    (batch,) = build(replace(plan, rows=replace(plan.rows, hidden_modes=plans.u8(1, 1, 1, 1))))
    assert batch.hidden is None


def test_a_batch_is_frozen():
    (batch,) = build(plans.make_decode_plan(1))
    assert isinstance(batch, ForwardBatch)
    with pytest.raises(AttributeError):
        batch.seq_lens = batch.positions
    assert max(len(fields(type(part))) for part in (batch, batch.page_groups[0], batch.sampling)) <= 16
