from dataclasses import replace

import pytest

from protos.wire.enums import Feature, FinishReason, RowFailure
from scheduler_svc.core.events import (
    CacheFlushed,
    CacheFlushRequested,
    RequestFinished,
    RequestRefused,
    ResultReceived,
    Sampling,
    TokensReleased,
)
from scheduler_svc.core.request import RequestStatus
from scheduler_svc.core.settings import CoreSettings
from tests.support.core_harness import CoreHarness, make_spec, oracle, small_info
from tests.support.plans import PLAIN_FEATURES, full_sub_pool, window_sub_pool

SYSTEM = [(5 * index) % 89 for index in range(16)]
"""Four pages."""


def make_harness(*, budget_tokens: int = 64, **changes: object) -> CoreHarness:
    harness = CoreHarness(CoreSettings(budget_tokens=budget_tokens))
    harness.attach(info=small_info(**changes))
    return harness


def ask(stream_id: int, *tail: int, max_tokens: int = 2, **changes: object):
    return make_spec(stream_id, prompt=[*SYSTEM, *tail], max_tokens=max_tokens, **changes)


def first_position(harness: CoreHarness, handle: int) -> int:
    """Where the request's first row begins: behind what was cached."""
    for _, plan in harness.plans:
        handles = plan.rows.handles.tolist()
        if handle in handles:
            return int(plan.rows.first_positions[handles.index(handle)])
    raise AssertionError("no plan has the request")


def cached(harness: CoreHarness, stream_id: int) -> int:
    end = harness.end(stream_id)
    assert isinstance(end, RequestFinished)
    return end.usage.cached_tokens


def assert_right(harness: CoreHarness, *stream_ids: int) -> None:
    info = next(iter(harness.infos.values()))
    for spec in harness.specs.values():
        if not stream_ids or spec.stream.stream_id in stream_ids:
            assert harness.outputs[spec.stream] == oracle(info, spec)
    harness.assert_balanced()


def test_a_prefix_is_computed_once_and_its_tokens_are_counted():
    harness = make_harness()
    harness.submit(ask(1, 90))
    harness.run()

    released = [out for out in harness.submit(ask(2, 91)) + harness.deliver() if isinstance(out, TokensReleased)]
    harness.run()

    assert (first_position(harness, 1), first_position(harness, 2)) == (0, 16)
    assert (cached(harness, 1), cached(harness, 2)) == (0, 16)
    assert [out.cached_tokens for out in released] == [16]
    counters = harness.state.counters
    assert (counters.cache.queried_tokens, counters.cache.hit_tokens, counters.cache.prompt_tokens) == (34, 16, 16)
    assert_right(harness)


def test_samples_of_one_prompt_share_the_pages_of_its_prefix():
    harness = make_harness()
    sampling = Sampling(temperature=1.0, seed=3)
    specs = [ask(1 + index, 90, sampling=replace(sampling, sample_index=index)) for index in range(4)]
    harness.submit(*specs)
    most_used = 0
    while harness.pending["w0"]:
        harness.deliver()
        (pages,) = harness.state.gauges().workers[0].pages_used
        most_used = max(most_used, pages)

    assert [cached(harness, stream_id) for stream_id in (1, 2, 3, 4)] == [0, 16, 16, 16]
    assert harness.state.counters.prefill_tokens == 17 + 3
    assert most_used <= 4 + 4, "four pages of the prefix, and one for each sample's own"
    assert_right(harness)


@pytest.mark.parametrize(("length", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (17, 16)])
def test_at_least_one_token_of_a_repeated_prompt_is_computed(length, hit):
    harness = make_harness()
    prompt = [*SYSTEM, 90][:length]
    harness.submit(make_spec(1, prompt=prompt, max_tokens=1))
    harness.run()
    harness.submit(make_spec(2, prompt=prompt, max_tokens=3))
    harness.run()

    assert cached(harness, 2) == hit
    assert_right(harness)


def test_output_pages_are_cached_too():
    harness = make_harness()
    harness.submit(ask(1, 90, max_tokens=12))
    harness.run()
    whole = [*SYSTEM, 90, *harness.output(1)]

    harness.submit(make_spec(2, prompt=[*whole, 7], max_tokens=2))
    harness.run()

    assert cached(harness, 2) == (len(whole) - 1) // 4 * 4
    assert_right(harness)


def test_domains_do_not_see_each_other():
    harness = make_harness()
    harness.submit(ask(1, 90, isolation_domain=b"one"))
    harness.run()
    harness.submit(ask(2, 90, isolation_domain=b"two"), ask(3, 90, isolation_domain=b"one"), ask(4, 90))
    harness.run()

    assert [cached(harness, stream) for stream in (2, 3, 4)] == [0, 16, 0]
    assert_right(harness)


def test_requests_that_share_an_uncached_prefix_compute_it_once():
    harness = make_harness(budget_tokens=8)
    harness.submit(*[ask(stream, 80 + stream) for stream in range(1, 5)])

    assert len(harness.state.workers["w0"].running) == 1
    assert all(request.holding is None for request in harness.state.waiting)
    harness.run()

    assert [first_position(harness, handle) for handle in range(1, 5)] == [0, 16, 16, 16]
    assert harness.state.counters.prefill_tokens == 17 + 3
    assert_right(harness)


def test_others_pass_those_who_wait_for_a_prefix():
    harness = make_harness()
    harness.submit(ask(1, 90), ask(2, 91), make_spec(3, prompt=6))

    assert [plan.rows.handles.tolist() for _, plan in harness.plans] == [[1, 3]]
    harness.run()
    assert_right(harness)


def test_a_wait_for_a_prefix_ends_where_the_prompts_part():
    harness = make_harness(budget_tokens=16)
    harness.submit(make_spec(1, prompt=[*SYSTEM, *range(40)]), make_spec(2, prompt=[*SYSTEM[:8], 1, 2, 3, 4, 5]))
    harness.run()

    assert cached(harness, 2) == 8
    assert_right(harness)


@pytest.mark.parametrize("end", ["cancel", "fail", "lose"])
def test_a_wait_for_a_prefix_ends_with_the_one_who_computes_it(end):
    harness = make_harness(budget_tokens=4)
    harness.submit(ask(1, 90), ask(2, 91))
    harness.deliver()
    if end == "cancel":
        harness.cancel(1, FinishReason.ABORT)
    elif end == "lose":
        harness.lose()
        harness.attach()
    else:
        harness.fail_row = lambda plan, row: RowFailure.LIMIT if plan.rows.handles[row] == 1 else None
    harness.run()

    assert isinstance(harness.end(2), RequestFinished)
    assert_right(harness, 2)


def test_two_who_compute_the_same_page_end_up_with_one():
    """Their prompts are shorter than a page, so neither waits; their outputs are the same."""
    harness = make_harness(window=2)
    specs = [make_spec(stream, prompt=SYSTEM[:3], max_tokens=20) for stream in (1, 2)]
    harness.submit(*specs)
    for _ in range(12):
        harness.deliver()

    tables = [plan.page_tables[0] for _, plan in harness.plans][-1]
    first, second = (tables.indices[tables.indptr[row] : tables.indptr[row + 1]].tolist() for row in (0, 1))
    assert first[:3] == second[:3]
    assert first[-1] != second[-1]
    harness.run()
    memory = harness.state.workers["w0"].memory
    assert memory.allocators[0].held == len(list(memory.cache.nodes())) == (3 + 19) // 4
    assert_right(harness)


@pytest.mark.parametrize("failure", [RowFailure.NAN, RowFailure.CANARY])
def test_bad_numbers_empty_the_cache_of_what_the_attempt_used_or_brought_in(failure):
    harness = make_harness()
    harness.submit(ask(1, 90))
    harness.run()
    bad = len(harness.plans) + 1
    harness.fail_row = lambda plan, row: failure if plan.identity.seq == bad else None
    harness.submit(ask(2, 91, max_tokens=3))
    harness.run()
    harness.submit(ask(3, 92))
    harness.run()

    rows = [int(plan.rows.first_positions[0]) for _, plan in harness.plans if 2 in plan.rows.handles]
    assert rows == [16, 0, 17, 18]
    assert cached(harness, 3) == 16, "what the retry computed is cached again"
    assert_right(harness)


def test_a_retry_after_bad_numbers_uses_no_page_that_others_computed_meanwhile():
    """The second one brings the pages in while the first one tries again; the first one keeps its own."""
    harness = make_harness()
    harness.submit(make_spec(1, prompt=SYSTEM[:3], max_tokens=9), make_spec(2, prompt=SYSTEM[:3], max_tokens=9))
    failing = iter([RowFailure.NAN])
    harness.fail_row = lambda plan, row: next(failing, None) if plan.rows.handles[row] == 1 else None
    for _ in range(4):
        harness.deliver()

    rows = {int(handle): row for row, handle in enumerate(harness.plans[-1][1].rows.handles)}
    table = harness.plans[-1][1].page_tables[0]
    first_pages = {handle: int(table.indices[table.indptr[row]]) for handle, row in rows.items()}
    assert first_pages[1] != first_pages[2]
    harness.run()
    assert_right(harness)


def test_after_a_flush_nothing_is_found_and_running_requests_go_on():
    harness = make_harness()
    harness.submit(ask(1, 90))
    harness.run()
    harness.submit(ask(2, 91, max_tokens=20))

    assert harness.step(CacheFlushRequested(7)) == [CacheFlushed(7, 0)], "the running one uses every page"
    harness.submit(ask(3, 92))
    harness.run()

    assert cached(harness, 3) == 0
    harness.submit(ask(4, 93))
    harness.run()
    assert cached(harness, 4) == 16
    assert_right(harness)


def test_a_flush_tells_how_many_pages_are_free_by_it():
    harness = make_harness()
    harness.submit(ask(1, 90, max_tokens=4))
    harness.run()

    assert harness.step(CacheFlushRequested(3)) == [CacheFlushed(3, 5)]
    assert harness.state.workers["w0"].memory.allocators[0].free == 64
    assert harness.step(CacheFlushRequested(3)) == [CacheFlushed(3, 0)]


def test_a_lost_worker_takes_its_cache_along():
    harness = make_harness()
    harness.submit(ask(1, 90))
    harness.run()
    harness.lose()
    harness.attach()
    harness.submit(ask(2, 90))
    harness.run()

    assert cached(harness, 2) == 0
    assert_right(harness)


def test_a_request_goes_where_its_prefix_is():
    harness = make_harness()
    harness.attach("w1")
    harness.submit(ask(1, 90))
    harness.run()
    (where,) = {worker for worker, _ in harness.plans}
    harness.submit(make_spec(2, prompt=30, max_tokens=40))
    harness.submit(ask(3, 91))

    assert 3 in harness.state.workers[where].running
    harness.run()
    assert cached(harness, 3) == 16
    assert_right(harness)


def test_a_retracted_request_finds_its_own_pages_again():
    harness = CoreHarness(CoreSettings(new_token_ratio_start=0.0, new_token_ratio_floor=0.0))
    harness.attach(info=small_info(num_pages=8))
    specs = [make_spec(1, prompt=4, max_tokens=12), make_spec(2, prompt=12, max_tokens=12)]
    harness.submit(*specs)
    harness.run()

    counters = harness.state.counters
    assert counters.retractions >= 1
    assert counters.cache.hit_tokens > 0
    assert cached(harness, 2) == 0, "usage tells what was cached before the request ran"
    assert_right(harness)


def test_unused_cached_pages_are_given_up_when_others_need_them():
    harness = make_harness(num_pages=9)
    harness.submit(ask(1, 90))
    harness.run()
    gauges = harness.state.gauges().workers[0]
    assert (gauges.pages_used, gauges.pages_cached) == ((0,), (4,))

    harness.submit(make_spec(2, prompt=28, max_tokens=4))
    assert harness.state.gauges().workers[0].pages_used[0] >= 7
    harness.run()

    assert harness.state.gauges().workers[0].evicted_pages >= 3
    assert_right(harness)


def test_a_prefix_of_a_hybrid_model_is_cut_to_where_its_window_is_whole():
    pools = (
        full_sub_pool(num_pages=40, page_size=4),
        window_sub_pool(num_pages=8, page_size=4, window_tokens=6),
    )
    harness = CoreHarness(CoreSettings(budget_tokens=4))
    info = small_info(sub_pools=pools, features=PLAIN_FEATURES | {Feature.WINDOW_SUB_POOL})
    harness.attach(info=info)
    long = [(3 * index) % 83 for index in range(40)]
    harness.submit(make_spec(1, prompt=long, max_tokens=2))
    harness.run()
    harness.submit(make_spec(2, prompt=[*long[:20], 95, 96], max_tokens=2))
    harness.run()
    harness.submit(make_spec(3, prompt=[*long, 95], max_tokens=2))
    harness.run()

    assert cached(harness, 2) < 20, "the window pages in the middle were given up for later ones"
    assert cached(harness, 3) > 0
    assert_right(harness)


def test_a_cancelled_request_leaves_its_pages_to_the_next():
    harness = make_harness(budget_tokens=8, window=2)
    harness.submit(ask(1, 90))
    harness.deliver()
    harness.cancel(1)
    harness.submit(ask(2, 90))
    harness.run()

    assert cached(harness, 2) == 8
    assert_right(harness, 2)


def test_a_request_that_fails_for_good_leaves_nothing_bad_behind():
    harness = make_harness()
    harness.fail_row = lambda plan, row: RowFailure.NAN if plan.rows.handles[row] == 1 else None
    harness.submit(ask(1, 90))
    harness.run()
    harness.submit(ask(2, 90))
    harness.run()

    assert isinstance(harness.end(1), RequestRefused)
    assert cached(harness, 2) == 0
    assert_right(harness, 2)


def test_a_late_result_does_not_bring_pages_in():
    harness = make_harness(window=2)
    harness.submit(ask(1, 90))
    result = harness.execute()
    harness.cancel(1)
    harness.step(ResultReceived("w0", result))

    assert list(harness.state.workers["w0"].memory.cache.nodes()) == []
    assert all(request.status is not RequestStatus.WAITING for request in harness.state.streams.values())
