import pytest

from protos.wire.errors import InternalFault
from scheduler_svc.memory.page_allocator import PageAllocator


def test_pages_come_in_order_and_never_the_sink():
    allocator = PageAllocator(4)

    assert allocator.take(3).tolist() == [1, 2, 3]
    assert (allocator.free, allocator.held, allocator.usable) == (0, 3, 3)


def test_pages_given_back_are_the_next_taken():
    allocator = PageAllocator(8)
    pages = allocator.take(5)

    allocator.give_back(pages[1:3])

    assert allocator.take(3).tolist() == [2, 3, 6]


def test_more_than_is_free_is_a_bug():
    with pytest.raises(AssertionError, match="more pages taken"):
        PageAllocator(3).take(3)


def test_giving_back_twice_is_a_bug():
    allocator = PageAllocator(3)
    pages = allocator.take(1)
    allocator.give_back(pages)

    with pytest.raises(AssertionError, match="not held"):
        allocator.give_back(pages)


def test_check_sees_a_page_that_nobody_holds():
    allocator = PageAllocator(4)
    pages = allocator.take(2)
    allocator.check(pages.tolist())

    with pytest.raises(InternalFault):
        allocator.check(pages[:1].tolist())


def test_check_sees_a_page_with_two_holders():
    allocator = PageAllocator(4)
    pages = allocator.take(2)

    with pytest.raises(InternalFault):
        allocator.check([*pages, pages[0]])


def test_check_sees_a_page_held_and_free():
    allocator = PageAllocator(4)

    with pytest.raises(InternalFault):
        allocator.check([2])
