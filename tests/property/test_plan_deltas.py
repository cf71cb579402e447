"""A delta stands for its plan, whatever changed; a wrong base is noticed; malformed deltas raise only the taxonomy."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from protos.wire import columns
from protos.wire import delta as wire_delta
from protos.wire.codec import decode_plan, encode_plan
from protos.wire.delta_columns import FRESH_COLUMNS, OPTIONAL_FRESH_COLUMNS, SOFT_COLUMNS, SOFT_TABLES
from protos.wire.delta_making import changes_of
from protos.wire.digest import plan_digest
from protos.wire.errors import EngineError, InvalidPlan, NeedFullPlan
from protos.wire.plan import ForwardPlan, PlanDelta, SamplingColumns
from protos.wire.validate import validate_plan
from tests.property.test_core_simulation import Life
from tests.support import plans
from tests.support.plans import f32, u8, u32

TURNS = 60


def sizes(info):
    return [pool.page_size for pool in info.sub_pools]


def delta_of(plan, base, info):
    return changes_of(plan, base, digest=plan_digest(plan), base_digest=plan_digest(base), page_sizes=sizes(info))


def complete(delta, base, *, page_sizes):
    held = None if base is None else wire_delta.Base(base, plan_digest(base))
    return wire_delta.complete(delta, held, page_sizes=page_sizes)


def through_bytes(plan: ForwardPlan) -> ForwardPlan:
    return decode_plan(encode_plan(plan))


def assert_same(got: ForwardPlan, plan: ForwardPlan) -> None:
    assert plan_digest(got) == plan_digest(plan)
    assert encode_plan(got) == encode_plan(plan)


def lives(seeds):
    """Plans of random lives of a scheduler, worker by worker in order, with the worker's description."""
    for seed in seeds:
        life = Life(seed)
        for _ in range(TURNS):
            life.turn()
        life.settle()
        for name in life.names:
            yield life.info, [plan for worker, plan in life.harness.plans if worker == name]


def test_plans_of_random_lives_come_back_from_their_deltas_against_any_earlier_plan():
    draw = random.Random(1)
    found = in_part = 0
    for info, sent in lives(range(6)):
        for index, plan in enumerate(sent[1:], start=1):
            base = sent[max(0, index - draw.choice([1, 1, 1, 2, 9]))]
            delta = delta_of(plan, base, info)
            if delta is None:
                continue
            found += 1
            in_part += 0 < len(delta.rows.handles) < plan.rows.num_rows
            got = complete(through_bytes(delta), through_bytes(base), page_sizes=sizes(info))
            validate_plan(got, replace(info, incarnation=plan.identity.incarnation))
            assert_same(got, plan)
    assert found > 200
    assert in_part > 50


def test_a_plan_that_uses_everything_comes_back():
    info = plans.make_full_info()
    base, plan = plans.make_rich_plan(info, seq=8), plans.make_rich_plan(info, seq=9)
    delta = delta_of(plan, base, info)
    assert len(delta.rows.handles) == 0
    assert_same(complete(through_bytes(delta), base, page_sizes=sizes(info)), plan)
    assert len(encode_plan(delta)) < len(encode_plan(plan))


def decode_plan_of(handles, *, info, seq=2, cached=40, **changes):
    rows = [plans.decode(cached, handle=handle, pages=[10 * handle + page for page in range(3)]) for handle in handles]
    return plans.make_plan(rows, info=info, seq=seq, **changes)


CHANGES = {
    "rows that left, moved and came": lambda info: decode_plan_of([4, 9, 2], info=info, seq=3, cached=41),
    "a column that came": lambda info: decode_plan_of(
        [1, 2, 3], info=info, seq=3, cached=41, sampling=SamplingColumns(top_ps=f32(1, 1, 0.5), top_ks=u32(0, 0, 0))
    ),
    "one more page": lambda info: replace(decode_plan_of([1, 2, 3], info=info, seq=3, cached=47)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_from_one_step_to_the_next(name):
    info = plans.make_info()
    base, plan = decode_plan_of([1, 2, 3, 4], info=info), CHANGES[name](info)
    delta = delta_of(plan, base, info)
    assert delta is not None
    assert_same(complete(through_bytes(delta), base, page_sizes=sizes(info)), plan)


def test_a_column_that_went_is_not_made_up():
    info = plans.make_info()
    base = decode_plan_of([1, 2], info=info, sampling=SamplingColumns(min_ps=f32(0, 0.3)))
    plan = decode_plan_of([1, 2], info=info, seq=3, cached=41)
    delta = delta_of(plan, base, info)
    assert delta.delta.base_rows.tolist() == [1, 0], "row 2 had another min_p"
    assert_same(complete(delta, base, page_sizes=sizes(info)), plan)


def test_rows_of_another_attempt_are_in_full():
    info = plans.make_info()
    base = decode_plan_of([1, 2], info=info)
    plan = plans.make_plan(
        [plans.decode(41, handle=1, attempt=1, pages=[10, 11, 12]), plans.decode(41, handle=2, pages=[20, 21, 22])],
        info=info,
        seq=3,
    )
    assert delta_of(plan, base, info).delta.base_rows.tolist() == [0, 2]


def test_nothing_in_common_is_no_delta():
    info = plans.make_info()
    assert delta_of(decode_plan_of([7], info=info, seq=3), decode_plan_of([1, 2], info=info), info) is None


def example():
    info = plans.make_info()
    base, plan = decode_plan_of([1, 2, 3], info=info), decode_plan_of([1, 2, 3, 4], info=info, seq=3, cached=41)
    return info, base, plan, delta_of(plan, base, info)


@pytest.mark.parametrize(
    "wrong_base",
    [
        lambda base: None,
        lambda base: plans.with_element(base, "page_tables.0.indices", 0, 99),
        lambda base: plans.with_element(base, "rows.attempts", 0, 9),
    ],
)
def test_another_base_or_none_needs_the_plan_in_full(wrong_base):
    info, base, _, delta = example()
    with pytest.raises(NeedFullPlan) as caught:
        complete(delta, wrong_base(base), page_sizes=sizes(info))
    assert caught.value.plan_seq == 3


def test_what_does_not_add_up_to_the_plan_needs_it_in_full():
    info, base, _, delta = example()
    with pytest.raises(NeedFullPlan):
        complete(plans.with_element(delta, "rows.samples", 0, 0), base, page_sizes=sizes(info))


MALFORMED = {
    "a base row beyond": {"base_rows": u32(1, 2, 9, 0)},
    "a base row twice": {"base_rows": u32(1, 1, 3, 0)},
    "more rows than columns": {"base_rows": u32(1, 2, 3, 0, 0)},
    "an unknown column": {"present": u8(200)},
    "a column that is not there": {"present": u8(0, 6)},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_delta_is_an_invalid_plan(name):
    info, base, _, delta = example()
    with pytest.raises(InvalidPlan):
        complete(replace(delta, delta=replace(delta.delta, **MALFORMED[name])), base, page_sizes=sizes(info))


@hypothesis_settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_whatever_is_mutated_the_plan_comes_back_or_an_error_of_the_taxonomy(seed):
    draw = np.random.default_rng(seed)
    info = plans.make_full_info()
    base, plan = plans.make_rich_plan(info, seq=8), plans.make_rich_plan(info, seq=9)
    body = bytearray(encode_plan(delta_of(plan, base, info)))
    for _ in range(draw.integers(1, 4)):
        body[draw.integers(len(body))] = draw.integers(256)
    try:
        arrived = decode_plan(bytes(body))
    except EngineError:
        return
    if arrived.delta is None:
        return
    try:
        got = complete(arrived, base, page_sizes=sizes(info))
    except (InvalidPlan, NeedFullPlan):
        return
    assert plan_digest(got) == arrived.delta.digest


def test_the_delta_names_its_base_and_itself():
    _, base, plan, delta = example()
    assert isinstance(delta.delta, PlanDelta)
    assert (delta.delta.base_seq, delta.delta.base_digest) == (2, plan_digest(base))
    assert delta.delta.digest == plan_digest(plan)


def test_no_column_of_a_row_is_forgotten():
    """A column that no delta carries would make every plan that has it travel twice."""
    known = {column.path for column in SOFT_COLUMNS}
    known |= {f"rows.{name}" for name in (*FRESH_COLUMNS, *OPTIONAL_FRESH_COLUMNS, "first_positions")}
    known |= {f"rows.{name}" for name in ("length_source_seqs", "length_source_rows")}  # such plans travel in full
    for table in SOFT_TABLES:
        known |= {f"{table.group}.{name}" for name in (table.indptr, *(name for name, _ in table.contents))}
    known |= {f"penalties.output_{name}" for name in ("indptr", "ids", "counts")}
    groups = (("rows", columns.ROWS), ("sampling", columns.SAMPLING), ("penalties", columns.PENALTIES))
    assert known == {f"{group}.{column.name}" for group, found in groups for column in found}
