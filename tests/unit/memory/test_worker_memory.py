from array import array

import pytest

from protos.wire.enums import SubPoolKind
from protos.wire.errors import UnsupportedFeature
from protos.wire.worker_info import SubPool
from scheduler_svc.memory.memory_check import check_memory
from scheduler_svc.memory.page_holding import MemoryKey, PageHolding
from scheduler_svc.memory.page_list import PageList
from scheduler_svc.memory.prefix_match import PrefixMatch
from scheduler_svc.memory.worker_memory import WorkerMemory, check_geometry
from tests.support.plans import full_sub_pool, window_sub_pool

KEY = MemoryKey("w0", 0)
FULL = full_sub_pool(num_pages=9, page_size=4)
WINDOW = window_sub_pool(num_pages=9, page_size=4, window_tokens=6)


def reserve(memory: WorkerMemory, tokens: int) -> PageHolding:
    """Without a look into the cache."""
    return memory.reserve(array("i", range(tokens)), PrefixMatch(memory.cache, b""))


def free(memory: WorkerMemory) -> list[int]:
    return [allocator.free for allocator in memory.allocators]


def full_memory() -> WorkerMemory:
    return WorkerMemory(KEY, (FULL,), slack_tokens=4)


def hybrid_memory(*, slack_tokens: int = 4) -> WorkerMemory:
    return WorkerMemory(KEY, (FULL, WINDOW), slack_tokens=slack_tokens)


def test_a_reservation_covers_its_tokens_and_grows_by_pages():
    memory = full_memory()
    holding = reserve(memory, 5)
    assert (holding.allocated_len, free(memory)) == (8, [6])

    memory.grow(holding, 8)
    assert free(memory) == [6]
    memory.grow(holding, 9)

    assert (holding.allocated_len, free(memory)) == (12, [5])
    assert holding.lists[0].held().tolist() == [1, 2, 3]


def test_release_gives_everything_back_at_once():
    memory = full_memory()
    holding = reserve(memory, 20)

    memory.release(holding)

    assert free(memory) == [8]
    check_memory(memory, [])


def test_growth_is_refused_when_one_sub_pool_is_short():
    memory = full_memory()
    first = reserve(memory, 28)
    second = reserve(memory, 4)

    assert not memory.can_grow(second, 5)
    memory.release(first)
    assert memory.can_grow(second, 5)


def test_a_window_sub_pool_is_filled_chunk_by_chunk():
    memory = hybrid_memory()
    holding = reserve(memory, 16)
    assert (holding.allocated_len, free(memory)) == (0, [4, 8])

    memory.grow(holding, 8)

    assert (holding.allocated_len, free(memory)) == (8, [4, 6])


@pytest.mark.parametrize(
    ("kv_len", "first"),
    [(9, 0), (13, 1), (14, 1), (17, 2), (16, 2)],
)
def test_a_window_page_goes_once_no_later_window_reaches_it(kv_len, first):
    memory = hybrid_memory()
    holding = reserve(memory, 20)
    memory.grow(holding, 20)

    memory.commit(holding, array("i", range(20)), kv_len)

    assert [pages.first for pages in holding.lists] == [0, first]
    check_memory(memory, [holding])


def test_demand_of_a_window_sub_pool_is_bounded():
    memory = hybrid_memory(slack_tokens=4)

    assert memory.demand.most(12) == [3, 3]
    assert memory.demand.most(400) == [100, 5]


def test_further_demand_counts_what_is_held():
    memory = hybrid_memory()
    short, long = reserve(memory, 4), reserve(memory, 12)
    memory.grow(long, 12)

    assert memory.demand.further([short, long], [5, 16]) == [1 + 1, 2 + 1]
    assert memory.demand.further([], []) == [0, 0]


def test_capacity_is_that_of_the_smallest_sub_pool():
    assert full_memory().capacity.tokens == 32
    assert hybrid_memory(slack_tokens=4).capacity.tokens == 32
    small = window_sub_pool(num_pages=4, page_size=4, window_tokens=6)
    assert WorkerMemory(KEY, (FULL, small), slack_tokens=4).capacity.tokens == 12


def test_page_lists_grow_past_their_first_capacity():
    pages = PageList()
    allocated = full_sub_pool(num_pages=100)
    memory = WorkerMemory(KEY, (allocated,), slack_tokens=0)
    holding = reserve(memory, 16 * 70)
    pages.extend(holding.lists[0].held())

    assert pages.held().tolist() == list(range(1, 71))
    assert pages.drop_before(3).tolist() == [1, 2, 3]
    assert pages.until(5).tolist() == [4, 5]
    assert pages.between(4, 6).tolist() == [5, 6]
    assert pages.count == 67


@pytest.mark.parametrize(
    ("sub_pools", "field"),
    [
        ((), "sub_pools"),
        ((WINDOW,), "sub_pools"),
        ((FULL, SubPool(kind=SubPoolKind.RECURRENT, num_pages=4, page_size=4, bytes_per_page=1)), "sub_pools"),
        ((FULL, window_sub_pool(page_size=8)), "sub_pools.page_size"),
    ],
)
def test_other_geometries_are_refused(sub_pools, field):
    with pytest.raises(UnsupportedFeature) as refused:
        check_geometry(sub_pools)
    assert refused.value.field == field


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize(("window", "slack"), [(1, 1), (6, 4), (16, 16), (17, 31), (48, 32)])
def test_a_window_sub_pool_is_asked_for_what_a_sequence_can_hold_and_at_most_two_pages_more(page_size, window, slack):
    pools = [full_sub_pool(page_size=page_size), window_sub_pool(page_size=page_size, window_tokens=window)]
    memory = WorkerMemory(KEY, pools, slack_tokens=slack)
    held = 0
    for kv_len in range(window + slack, window + slack + 2 * page_size):
        holding = reserve(memory, kv_len + slack)
        memory.grow(holding, kv_len + slack)
        memory.commit(holding, array("i", range(kv_len)), kv_len)
        held = max(held, holding.lists[1].count)
        memory.release(holding)

    assert held <= memory.demand.most(10_000)[1] <= held + 2
