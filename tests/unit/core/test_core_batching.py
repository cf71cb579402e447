import pytest

from protos.wire.enums import Feature, ForwardMode, RowFailure
from protos.wire.errors import UnsupportedFeature
from scheduler_svc.core.attachment import check_worker
from scheduler_svc.core.batching import chunk_end
from scheduler_svc.core.settings import CoreSettings
from tests.support.core_harness import CoreHarness, make_spec, oracle, small_info
from tests.support.plans import CORE_FEATURES, full_sub_pool


def make_harness(*, budget_tokens: int = 8, **changes: object) -> CoreHarness:
    harness = CoreHarness(CoreSettings(budget_tokens=budget_tokens))
    harness.attach(info=small_info(**changes))
    return harness


def shapes(harness: CoreHarness) -> list[tuple[ForwardMode, list[tuple[int, int]]]]:
    """Mode and (extend length, sequence length) of the rows, plan by plan."""
    return [
        (plan.forwards[0].mode, list(zip(plan.rows.extend_lens.tolist(), plan.rows.seq_lens.tolist(), strict=True)))
        for _, plan in harness.plans
    ]


@pytest.mark.parametrize(
    ("begin", "known", "budget", "end"),
    [(0, 5, 8, 5), (0, 9, 8, 8), (0, 20, 7, 4), (4, 20, 8, 12), (6, 20, 4, 8), (4, 20, 3, 4), (4, 6, 3, 6)],
)
def test_chunks_end_on_page_borders_or_at_the_end_of_what_is_known(begin, known, budget, end):
    assert chunk_end(begin, known=known, budget=budget, page_size=4) == end


def test_a_long_prompt_is_prefilled_in_chunks_and_samples_with_the_last():
    harness = make_harness()

    harness.submit(make_spec(1, prompt=19, max_tokens=2))
    harness.run()

    assert shapes(harness) == [
        (ForwardMode.EXTEND, [(8, 8)]),
        (ForwardMode.EXTEND, [(8, 16)]),
        (ForwardMode.EXTEND, [(3, 19)]),
        (ForwardMode.DECODE, [(1, 20)]),
    ]
    assert [plan.rows.samples.tolist() for _, plan in harness.plans] == [[0], [0], [1], [1]]


def test_the_budget_is_at_least_one_page():
    harness = make_harness(budget_tokens=1)

    harness.submit(make_spec(1, prompt=6, max_tokens=1))
    harness.run()

    assert shapes(harness) == [(ForwardMode.EXTEND, [(4, 4)]), (ForwardMode.EXTEND, [(2, 6)])]


def test_decode_rows_ride_in_every_plan_and_do_not_count():
    harness = make_harness()
    harness.submit(make_spec(1, prompt=3, max_tokens=6))
    harness.submit(make_spec(2, prompt=19, max_tokens=1))
    harness.run()

    assert shapes(harness)[1:4] == [
        (ForwardMode.MIXED, [(1, 4), (8, 8)]),
        (ForwardMode.MIXED, [(1, 5), (8, 16)]),
        (ForwardMode.MIXED, [(1, 6), (3, 19)]),
    ]


def test_several_requests_share_the_budget():
    harness = make_harness(budget_tokens=16)

    harness.submit(*[make_spec(stream, prompt=7, max_tokens=1) for stream in (1, 2, 3)])

    assert shapes(harness) == [(ForwardMode.EXTEND, [(7, 7), (7, 7)])]
    harness.run()
    assert shapes(harness)[1] == (ForwardMode.EXTEND, [(7, 7)])


def test_the_workers_token_limit_holds_beside_decode_rows():
    harness = make_harness(budget_tokens=64, max_tokens=6)
    harness.submit(*[make_spec(stream, prompt=2, max_tokens=12) for stream in range(1, 9)])
    harness.run()

    assert max(len(plan.tokens.ids) for _, plan in harness.plans) == 6
    assert max(plan.rows.num_rows for _, plan in harness.plans) == 3
    assert all(len(harness.output(stream)) == 12 for stream in range(1, 9))


def test_the_workers_row_limit_holds():
    harness = make_harness(budget_tokens=64, max_rows=2)
    harness.submit(*[make_spec(stream) for stream in range(1, 6)])
    harness.run()

    assert max(plan.rows.num_rows for _, plan in harness.plans) == 2


def test_the_next_plan_refers_to_tokens_that_are_not_known_yet():
    harness = make_harness(window=2)

    harness.submit(make_spec(1, prompt=5, max_tokens=3), make_spec(2, prompt=2, max_tokens=3))

    first, second = [plan for _, plan in harness.plans]
    assert first.tokens.sources is None
    assert second.tokens.sources.tolist() == [1, 1]
    assert second.tokens.ids.tolist() == [0, 0]
    assert second.tokens.ref_seqs.tolist() == [1, 1]
    assert second.tokens.ref_rows.tolist() == [0, 1]
    assert second.identity.required_features == (Feature.TOKEN_REFERENCES,)
    harness.run()
    assert [harness.output(stream) for stream in (1, 2)] == [
        oracle(harness.infos["w0"], spec) for spec in harness.specs.values()
    ]


def test_without_references_rows_wait_for_their_token_while_others_go_on():
    harness = make_harness(window=2, features=CORE_FEATURES - {Feature.TOKEN_REFERENCES})

    harness.submit(make_spec(1, prompt=5, max_tokens=3), make_spec(2, prompt=19, max_tokens=2))
    harness.run()

    assert all(plan.tokens.sources is None for _, plan in harness.plans)
    assert shapes(harness)[1] == (ForwardMode.EXTEND, [(8, 8)])
    assert [len(harness.output(stream)) for stream in (1, 2)] == [3, 2]


def test_rows_known_to_end_by_length_are_left_out_of_the_next_plan():
    harness = make_harness(window=2)

    harness.submit(make_spec(1, prompt=5, max_tokens=2))
    harness.run()

    assert shapes(harness) == [(ForwardMode.EXTEND, [(5, 5)]), (ForwardMode.DECODE, [(1, 6)])]
    assert harness.state.counters.late_rows == 0


def test_a_row_wasted_after_the_end_is_dropped():
    harness = make_harness(window=2)
    spec = make_spec(1, prompt=5, max_tokens=9)
    first = oracle(harness.infos["w0"], spec)[0]

    harness.submit(make_spec(1, prompt=5, max_tokens=9, stop_token_ids=frozenset({first})))
    harness.run()

    assert harness.output(1) == [first]
    assert harness.state.counters.late_rows == 1
    harness.assert_balanced()


def test_memory_pressure_retracts_the_one_with_fewest_outputs_and_loses_nothing():
    harness = CoreHarness(CoreSettings(new_token_ratio_start=0.0, new_token_ratio_floor=0.0))
    harness.attach(info=small_info(num_pages=7))
    specs = [make_spec(1, prompt=4, max_tokens=16), make_spec(2, prompt=4, max_tokens=16)]
    harness.submit(*specs)
    harness.run()

    assert harness.state.counters.retractions >= 1
    assert harness.state.new_token_ratio > 0
    attempts = {}
    for _, plan in harness.plans:
        for handle, attempt in zip(plan.rows.handles.tolist(), plan.rows.attempts.tolist(), strict=True):
            attempts.setdefault(handle, set()).add(attempt)
    assert attempts[1] == {0}
    assert attempts[2] > {0}
    assert [harness.output(stream) for stream in (1, 2)] == [oracle(harness.infos["w0"], spec) for spec in specs]


def test_a_row_retracted_after_it_was_chosen_is_not_in_the_plan():
    """The middle request fell behind by a failed row; the youngest then needs its pages at a page border."""
    harness = CoreHarness(CoreSettings(new_token_ratio_start=0.0, new_token_ratio_floor=0.0))
    harness.attach(info=small_info(num_pages=5))
    specs = [
        make_spec(1, prompt=1, max_tokens=15),
        make_spec(2, prompt=1, max_tokens=15),
        make_spec(3, prompt=1, max_tokens=15),
    ]
    harness.submit(*specs)
    failing = iter([RowFailure.LIMIT])
    harness.fail_row = lambda plan, row: next(failing, None) if plan.rows.handles[row] == 2 else None
    harness.run()

    assert harness.state.counters.retractions >= 1
    assert [harness.output(spec.stream.stream_id) for spec in specs] == [
        oracle(harness.infos["w0"], spec) for spec in specs
    ]


def test_a_small_request_does_not_overtake_one_that_waits_for_pages():
    harness = make_harness(budget_tokens=64, num_pages=17)
    harness.submit(make_spec(1, prompt=30, max_tokens=10))
    harness.submit(make_spec(2, prompt=40, max_tokens=2), make_spec(3, prompt=1, max_tokens=2))
    harness.run()

    first_rows = [plan.rows.handles.tolist() for _, plan in harness.plans]
    begins = {handle: next(i for i, handles in enumerate(first_rows) if handle in handles) for handle in (1, 2, 3)}
    assert begins[1] < begins[2] <= begins[3]
    assert begins[2] == 10


def test_work_goes_to_the_least_loaded_worker():
    harness = make_harness(budget_tokens=64)
    harness.attach("w1")
    harness.attach("w2", small_info(num_pages=200))

    harness.submit(*[make_spec(stream, prompt=150) for stream in (1, 2, 3, 4)])

    placed = {worker.name: len(worker.running) for worker in harness.state.workers.values()}
    assert placed["w2"] == 1
    assert placed == {"w0": 1, "w1": 1, "w2": 1}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_tokens": 4}, "limits.max_tokens"),
        ({"modes": frozenset({ForwardMode.EXTEND, ForwardMode.DECODE})}, "modes"),
        ({"sub_pools": (full_sub_pool(page_size=4), full_sub_pool(page_size=8))}, "sub_pools.page_size"),
    ],
)
def test_a_worker_the_core_cannot_plan_for_is_refused(changes, field):
    with pytest.raises(UnsupportedFeature) as refused:
        check_worker(small_info(**changes))
    assert refused.value.field == field
