"""Random plans: building is a pure function of the plan, and trimming is the exact inverse of padding."""

from itertools import accumulate

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.wire.codec import encode_plan
from protos.wire.plan import LogprobColumns, SamplingColumns
from tests.support import plans
from tests.support.batch_content import content, storages
from worker_svc.batch.builder import BatchBuilder
from worker_svc.batch.forward_batch import PaddedShape
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.token_to_kv_pool import KVGeometry

INFO = plans.make_info(sub_pools=(plans.full_sub_pool(), plans.window_sub_pool(window_tokens=32)))


class Pages:
    geometry = KVGeometry(num_pages=1024, page_size=16, num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)


BUILDER = BatchBuilder(translator=IndexTranslator((Pages(), Pages())), page_sizes=(16, 16), device=torch.device("cpu"))

ROWS = st.lists(
    st.builds(
        plans.Row,
        cached=st.one_of(st.just(0), st.integers(0, 100)),
        extend=st.one_of(st.just(1), st.integers(1, 40)),
        samples=st.integers(0, 1),
    ),
    max_size=6,
)


@st.composite
def random_plans(draw):
    rows = draw(ROWS)
    split = draw(st.integers(0, len(rows)))
    forwards = [
        plans.whole_forward(part, row_begin=begin, row_end=begin + len(part))
        for begin, part in ((0, rows[:split]), (split, rows[split:]))
        if part
    ] or [plans.whole_forward([])]
    groups = {}
    if draw(st.booleans()):
        groups["sampling"] = SamplingColumns(
            temperatures=plans.f32(*[1] * len(rows)), seeds=plans.u64(*range(len(rows)))
        )
        wanted = [draw(st.integers(0, row.extend)) for row in rows]
        groups["logprobs"] = LogprobColumns(
            output_wanted=plans.u8(*[1] * len(rows)),
            prompt_starts=plans.i32(*[row.cached + row.extend - n for row, n in zip(rows, wanted, strict=True)]),
            prompt_top_counts=plans.u8(*[2] * len(rows)),
            target_indptr=plans.u32(0, *accumulate(wanted)),
            target_ids=plans.i32(*range(sum(wanted))),
        )
    plan = plans.make_plan(rows, info=INFO, forwards=forwards, **groups)
    if rows and draw(st.booleans()):
        modes = draw(st.lists(st.integers(1, 3), min_size=len(rows), max_size=len(rows)))
        plan = plans.with_value(plan, "rows.hidden_modes", plans.u8(*modes))
    return plan


@settings(max_examples=120)
@given(random_plans())
def test_building_twice_gives_equal_batches_of_no_shared_storage_and_leaves_the_plans_bytes(plan):
    before = encode_plan(plan)
    first, second = BUILDER.build(plan), BUILDER.build(plan)
    for batch in first:
        batch.check()
    assert content(first) == content(second)
    assert set(storages(first)).isdisjoint(storages(second) + storages(plan))
    assert encode_plan(plan) == before


@settings(max_examples=120)
@given(random_plans(), st.integers(0, 9), st.integers(0, 40), st.integers(0, 9))
def test_trimming_is_the_exact_inverse_of_padding(plan, rows, tokens, logits):
    for batch in BUILDER.build(plan):
        before = content(batch)
        shape = PaddedShape(
            num_reqs=batch.num_reqs + rows,
            num_tokens=batch.num_tokens + (rows if batch.extend is None else tokens),
            num_logits=batch.num_logits + logits,
        )
        padded = batch.pad(shape)
        padded.check()
        assert (padded.num_reqs, padded.num_tokens, padded.num_logits) == (
            shape.num_reqs,
            shape.num_tokens,
            shape.num_logits,
        )
        for group in padded.page_groups:
            assert not group.out_cache_loc[batch.num_tokens :].any()
            assert not group.kv_indices_host[group.kv_indptr_host[batch.num_reqs] :].any()
        trimmed = padded.trim()
        trimmed.check()
        assert content(trimmed) == before == content(batch)
