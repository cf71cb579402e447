"""Memory -> pages: the formula, whole pages, the least rank, graphs set aside, and refusals that say what works."""

import pytest

from protos.wire.errors import InvalidRequest
from worker_svc.kv.sizing import (
    CapacityRequest,
    FreeMemory,
    SubPoolNeed,
    plan_capacity,
    running_limit,
    shared_out,
    useful_pages,
    window_pages,
)

PAGE = 1000
FULL = SubPoolNeed(bytes_per_page=PAGE, useful_pages=10_000)
WINDOW = SubPoolNeed(bytes_per_page=5 * PAGE, useful_pages=10_000)


def pages(*, before=100 * PAGE, after=100 * PAGE, loaded=None, sub_pools=(FULL,), **choices):
    """Nobody else takes memory unless `loaded` says that the load took less than is gone."""
    ranks = (FreeMemory(before_load=before, after_load=after, loaded=before - after if loaded is None else loaded),)
    return plan_capacity(CapacityRequest(**{"ranks": ranks, "sub_pools": sub_pools, **choices}))


def test_a_size_in_bytes_gives_whole_pages():
    assert pages(kv_bytes=5999) == (5,)
    assert pages(kv_bytes=2000) == (2,)
    assert pages(kv_bytes=100 * PAGE) == (100,)


def test_a_number_of_pages_is_taken_as_it_is():
    assert pages(num_pages=2) == (2,)
    assert pages(num_pages=100) == (100,)


def test_without_a_size_a_quarter_of_the_free_memory_as_far_as_it_is_useful():
    assert pages() == (25,)
    assert pages(sub_pools=(SubPoolNeed(bytes_per_page=PAGE, useful_pages=7),)) == (7,)
    assert pages(sub_pools=(SubPoolNeed(bytes_per_page=PAGE, useful_pages=0),)) == (2,)
    assert pages(before=200 * PAGE) == (25,)


def test_a_fraction_is_of_what_was_free_before_the_weights_and_covers_them():
    """KV bytes = free after the weights - free before them x (1 - fraction)."""
    assert pages(before=200 * PAGE, after=150 * PAGE, memory_fraction=0.75) == (100,)
    assert pages(before=200 * PAGE, after=150 * PAGE, memory_fraction=1.0) == (150,)
    assert pages(before=200 * PAGE, after=150 * PAGE + 999, memory_fraction=0.75) == (100,)


def test_graph_memory_is_in_the_sum():
    assert pages(before=200 * PAGE, after=150 * PAGE, memory_fraction=0.75, graph_bytes=30 * PAGE) == (70,)
    assert pages(graph_bytes=20 * PAGE) == (20,)
    with pytest.raises(InvalidRequest, match="at most 79999"):
        pages(kv_bytes=90 * PAGE, graph_bytes=20_001)


def test_every_rank_gets_what_the_poorest_one_can_have():
    ranks = tuple(
        FreeMemory(before_load=before * PAGE, after_load=after * PAGE, loaded=(before - after) * PAGE)
        for before, after in ((200, 150), (100, 90))
    )
    assert pages(ranks=ranks) == (22,)
    assert pages(ranks=ranks, memory_fraction=0.5) == (40,)
    with pytest.raises(InvalidRequest, match="at most 90000"):
        pages(ranks=ranks, kv_bytes=100 * PAGE)


@pytest.mark.parametrize("granted", [12_000, 12_001, 17_000, 99_999, 1_234_567])
def test_a_hybrid_pools_bytes_are_shared_out_and_none_is_spent_twice(granted):
    full, window = shared_out(granted, (FULL, WINDOW))
    assert min(full, window) >= 2
    assert full * PAGE + window * 5 * PAGE <= granted
    assert full * PAGE + window * 5 * PAGE > granted - PAGE
    if granted > 50_000:
        assert window == pytest.approx(0.8 * full, rel=0.3)


def test_window_pages_that_no_row_could_use_become_full_ones():
    few = SubPoolNeed(bytes_per_page=5 * PAGE, useful_pages=20)
    assert shared_out(1_000_000, (FULL, few)) == (900, 20)


def test_a_number_of_pages_of_a_hybrid_is_of_the_full_sub_pool():
    assert pages(num_pages=10, sub_pools=(FULL, WINDOW)) == (10, 8)
    assert pages(num_pages=2, sub_pools=(FULL, WINDOW)) == (2, 2)
    assert window_pages(2) == 2
    with pytest.raises(InvalidRequest, match="num_pages is 21, the free memory allows at most 20"):
        pages(num_pages=21, sub_pools=(FULL, WINDOW))
    assert pages(num_pages=20, sub_pools=(FULL, WINDOW)) == (20, 16)


@pytest.mark.parametrize(
    ("choices", "field", "message"),
    [
        ({"kv_bytes": 1999}, "kv_bytes", "kv_bytes is 1999, the smallest that works is 2000"),
        ({"kv_bytes": 0}, "kv_bytes", "the smallest that works is 2000"),
        ({"kv_bytes": 11_999, "sub_pools": (FULL, WINDOW)}, "kv_bytes", "the smallest that works is 12000"),
        ({"num_pages": 1}, "num_pages", "num_pages is 1, the smallest that works is 2"),
        ({"kv_bytes": 101_000}, "kv_bytes", "kv_bytes is 101000, the free memory allows at most 100000"),
        ({"num_pages": 101}, "num_pages", "num_pages is 101, the free memory allows at most 100"),
        ({"num_pages": 5, "kv_bytes": 5000}, "kv_bytes", "exclude each other"),
        ({"num_pages": 5, "memory_fraction": 0.5}, "num_pages", "exclude each other"),
        ({"after": 7999}, "kv_bytes", "free memory is 7999 bytes; the KV pools take a quarter and need 8000"),
        (
            {"before": 200_000, "memory_fraction": 0.5},
            "memory_fraction",
            "memory_fraction is 0.5, the smallest that works is 0.51",
        ),
        ({"before": 101_000, "after": 1000, "memory_fraction": 1.0}, "memory_fraction", "101000 bytes are free"),
    ],
)
def test_a_refusal_says_what_would_work(choices, field, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        pages(**choices)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("before", "after", "graphs"), [(200_000, 100_000, 0), (333_333, 77_777, 12_345), (9_999, 5_000, 1)]
)
def test_the_smallest_fraction_that_a_refusal_names_works_and_less_does_not(before, after, graphs):
    with pytest.raises(InvalidRequest) as caught:
        pages(before=before, after=after, graph_bytes=graphs, memory_fraction=0.01)
    named = float(str(caught.value).rpartition(" ")[2])
    assert min(pages(before=before, after=after, graph_bytes=graphs, memory_fraction=named)) >= 2
    with pytest.raises(InvalidRequest):
        pages(before=before, after=after, graph_bytes=graphs, memory_fraction=round(named - 0.001, 3))


@pytest.mark.parametrize(
    ("tokens", "context", "asked", "limit"),
    [
        (1_000_000, 4096, 5000, 4096),
        (40_960, 8192, 5000, 2560),
        (20_480, 4096, 5000, 2560),
        (30_000, 5000, 5000, 3072),
        (100, 4096, 5000, 50),
        (1_000_000, 4096, 256, 256),
        (1, 4096, 256, 1),
    ],
)
def test_the_running_limit_is_the_formula_within_half_the_tokens_and_the_setting(tokens, context, asked, limit):
    """clamp(tokens / context x 512, 2048, 4096), then at most tokens / 2 and what was asked."""
    assert running_limit(capacity_tokens=tokens, context_tokens=context, asked=asked) == limit


def test_useful_pages_count_whole_pages_of_each_row_and_the_sink():
    assert useful_pages(max_rows=3, most_tokens=33, page_size=16) == 1 + 3 * 3


def test_memory_that_others_took_during_the_load_is_not_in_what_a_new_start_needs():
    with pytest.raises(InvalidRequest, match=r"is 0\.01, the smallest that works is 0\.072$"):
        pages(before=200 * PAGE, after=70 * PAGE, loaded=3 * PAGE + 200, memory_fraction=0.01)
    assert min(pages(before=73 * PAGE + 200, after=70 * PAGE, memory_fraction=0.072)) >= 2
    with pytest.raises(InvalidRequest, match=r"is 0\.5, .* is 0\.072 once others hold still: they took 126800 bytes"):
        pages(before=200 * PAGE, after=70 * PAGE, loaded=3 * PAGE + 200, memory_fraction=0.5)


def test_of_several_ranks_the_one_that_cannot_have_its_pools_is_told():
    ranks = tuple(
        FreeMemory(before_load=before, after_load=after, loaded=before - after)
        for before, after in ((150_000, 50_000), (11_000, 1000))
    )
    with pytest.raises(InvalidRequest, match="11000 bytes are free, weights, graphs and the smallest pools need 12000"):
        pages(ranks=ranks, memory_fraction=1.0)
