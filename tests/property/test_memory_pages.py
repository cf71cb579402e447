"""Worker memory and its prefix cache against a model without a tree, a heap or counts."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.memory_walk import MemoryWalk

STEPS = 6_500
"""Operations that do something, of each walk: together more than a hundred thousand."""
WINDOWS, PAGE_SIZES = (None, 1, 5, 40), (1, 4, 16, 64)
assert STEPS * len(WINDOWS) * len(PAGE_SIZES) >= 100_000
ANY = st.integers(0, 200)


class MemoryMachine(RuleBasedStateMachine):
    """Small pools, so that everything is evicted some time."""

    @initialize(page_size=st.sampled_from([1, 4, 16, 64]), pages=st.integers(1, 12), window=st.sampled_from([None, 5]))
    def make(self, page_size, pages, window):
        self.walk = MemoryWalk(page_size=page_size, pages=pages, window=window)

    @rule(domain=ANY, book=ANY, pages=ANY, more=ANY, trusts=st.sampled_from([True, True, True, False]))
    def begin(self, domain, book, pages, more, trusts):
        self.walk.begin(domain, book, pages, more, trusts=trusts)

    @rule(who=ANY, count=ANY)
    def advance(self, who, count):
        self.walk.advance(who, count)

    @rule(who=ANY, token=ANY)
    def append(self, who, token):
        self.walk.append(who, token)

    @rule(who=ANY)
    def end(self, who):
        self.walk.end(who)

    @rule(who=ANY)
    def distrust(self, who):
        self.walk.distrust(who)

    @rule()
    def flush(self):
        self.walk.flush()

    @invariant()
    def memory_and_model_agree(self):
        if hasattr(self, "walk"):
            self.walk.check()


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_long_random_walk_keeps_memory_and_model_in_agreement_and_both_pools_balance(page_size, window):
    rng = random.Random(page_size * 100 + (window or 0))
    walk = MemoryWalk(page_size=page_size, pages=24, window=window)
    while walk.steps < STEPS:
        who, count = rng.randrange(1000), rng.randrange(1000)
        match rng.choices(range(6), weights=[20, 50, 20, 9, 0.7, 0.3])[0]:
            case 0 if len(walk.readers) < 10:
                walk.begin(rng.randrange(2), rng.randrange(3), rng.randrange(5), count, trusts=rng.random() < 0.95)
            case 1:
                walk.advance(who, count)
            case 2:
                walk.append(who, count)
            case 0 | 3:
                walk.end(who)
            case 4:
                walk.distrust(who)
            case 5:
                walk.flush()
        walk.check()

    print(f"\npages of {page_size}, window {window}: {walk.steps} steps")
    assert min(walk.hits, walk.evicted, walk.exchanged) >= 20, (walk.hits, walk.evicted, walk.exchanged)
    if page_size > 1:
        assert all(walk.borders[offset, found] >= 20 for offset in (-1, 0, 1) for found in (False, True)), walk.borders
    assert walk.cut >= 20 or window in (None, 40)
    while walk.readers:
        walk.end(0)
    walk.check()
    assert walk.memory.available() == [allocator.usable for allocator in walk.memory.allocators]
