import numpy as np

from protos.wire.codec import decode_plan, encode_plan
from protos.wire.enums import Feature, ForwardMode, GraphPhase, GraphRefusal
from protos.wire.plan import GraphChoice
from protos.wire.worker_info import Buckets
from scheduler_svc.core.events import Sampling
from tests.support.core_harness import CoreHarness, make_spec, small_info
from tests.support.plans import CORE_FEATURES, make_full_info


def make_harness(**changes: object) -> CoreHarness:
    harness = CoreHarness()
    harness.attach(info=small_info(**changes))
    return harness


def test_greedy_plans_carry_no_sampling_columns():
    harness = make_harness()

    harness.submit(make_spec(1, sampling=Sampling(temperature=0, seed=5, top_k=3)))

    plan = harness.plans[0][1]
    assert plan.sampling is None
    assert plan.logprobs is None
    assert plan.identity.required_features == ()


def test_sampling_columns_hold_what_rows_asked_for_and_neutral_values_elsewhere():
    harness = make_harness()
    asked = Sampling(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=2**64 - 1)

    harness.submit(make_spec(1, sampling=asked), make_spec(2, sampling=Sampling(seed=9, top_k=3)))

    columns = harness.plans[0][1].sampling
    assert columns is not None
    assert columns.temperatures.tolist() == [0.5, 0]
    assert columns.top_ks.tolist() == [7, 0]
    assert columns.top_ps.tolist() == [0.25, 1]
    assert columns.min_ps.tolist() == [0.125, 0]
    assert columns.seeds.tolist() == [2**64 - 1, 0]


def test_columns_that_no_row_needs_are_absent():
    harness = make_harness()

    harness.submit(make_spec(1, sampling=Sampling(temperature=1.5, seed=1)))

    columns = harness.plans[0][1].sampling
    assert columns is not None
    assert columns.temperatures.tolist() == [1.5]
    assert (columns.top_ks, columns.top_ps, columns.min_ps) == (None, None, None)


def test_rows_that_do_not_sample_carry_neutral_values():
    harness = make_harness()

    harness.submit(
        make_spec(1, sampling=Sampling(temperature=1, seed=1)),
        make_spec(2, prompt=200, sampling=Sampling(temperature=1, seed=2), output_logprobs=True),
    )

    plan = harness.plans[0][1]
    assert plan.rows.samples.tolist() == [1, 0]
    assert plan.sampling.seeds.tolist() == [1, 0]
    assert plan.logprobs is None


def test_log_probability_columns_and_their_feature():
    harness = make_harness()

    harness.submit(make_spec(1, output_logprobs=True, top_logprobs=2), make_spec(2))

    plan = harness.plans[0][1]
    assert plan.logprobs.output_wanted.tolist() == [1, 0]
    assert plan.logprobs.output_top_counts.tolist() == [2, 0]
    assert plan.identity.required_features == (Feature.OUTPUT_LOGPROBS,)


def test_page_tables_list_what_the_rows_reach_and_write():
    harness = make_harness()
    harness.submit(make_spec(1, prompt=7, max_tokens=9))
    harness.submit(make_spec(2, prompt=9, max_tokens=2))
    harness.deliver()

    table = harness.plans[1][1].page_tables[0]
    assert table.indptr.tolist() == [0, 2, 5]
    assert table.indices.tolist() == [1, 2, 3, 4, 5]
    assert table.last_page_lens.tolist() == [4, 1]
    assert table.written_pages.tolist() == [2, 3, 4, 5]
    assert table.start_positions is None


def test_plans_survive_the_wire():
    harness = make_harness(window=2)
    harness.submit(
        make_spec(1, sampling=Sampling(temperature=1, seed=3)), make_spec(2, prompt=40, output_logprobs=True)
    )
    harness.run()

    for _, plan in harness.plans:
        decoded = decode_plan(encode_plan(plan))
        assert encode_plan(decoded) == encode_plan(plan)
        assert np.array_equal(decoded.page_tables[0].indices, plan.page_tables[0].indices)


def test_forwards_name_the_bucket_or_why_there_is_none():
    buckets = (
        Buckets(phase=GraphPhase.DECODE, sizes=(1, 2), live=(2,)),
        Buckets(phase=GraphPhase.PREFILL, sizes=(8, 16), live=(8,), slots=2),
    )
    harness = make_harness(buckets=buckets, features=CORE_FEATURES | {Feature.GRAPHS})
    harness.submit(make_spec(1, prompt=7, max_tokens=5), make_spec(2, prompt=1, max_tokens=3))
    harness.run()

    assert [(plan.forwards[0].mode, plan.forwards[0].graph) for _, plan in harness.plans] == [
        (ForwardMode.EXTEND, GraphChoice(phase=GraphPhase.PREFILL, bucket=8)),
        (ForwardMode.DECODE, GraphChoice(phase=GraphPhase.DECODE, bucket=2)),
        (ForwardMode.DECODE, GraphChoice(phase=GraphPhase.DECODE, bucket=2)),
        (ForwardMode.DECODE, GraphRefusal.NOT_CAPTURED_YET),
        (ForwardMode.DECODE, GraphRefusal.NOT_CAPTURED_YET),
    ]
    assert harness.plans[0][1].identity.required_features == (Feature.GRAPHS,)


def test_without_buckets_graphs_are_disabled():
    harness = make_harness()
    harness.submit(make_spec(1))

    assert harness.plans[0][1].forwards[0].graph is GraphRefusal.DISABLED


def test_window_sub_pools_have_tables_of_their_own():
    harness = CoreHarness()
    harness.attach(info=make_full_info())
    harness.submit(make_spec(1, prompt=300, max_tokens=2))
    harness.deliver()

    tables = harness.plans[2][1].page_tables
    assert [table.sub_pool for table in tables] == [0, 1]
    assert tables[0].start_positions is None
    assert tables[1].start_positions.tolist() == [192]
    assert Feature.WINDOW_SUB_POOL in harness.plans[2][1].identity.required_features
