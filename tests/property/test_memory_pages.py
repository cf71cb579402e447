"""Worker memory against a model that keeps plain sets of pages."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from scheduler_svc.memory.worker_memory import MemoryKey, PageHolding, WorkerMemory
from tests.support.plans import full_sub_pool, window_sub_pool

PAGE, WINDOW, PAGES = 2, 5, 12


class MemoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        pools = (
            full_sub_pool(num_pages=PAGES + 1, page_size=PAGE),
            window_sub_pool(num_pages=PAGES + 1, page_size=PAGE, window_tokens=WINDOW),
        )
        self.memory = WorkerMemory(MemoryKey("w0", 0), pools, slack_tokens=4)
        self.held: list[tuple[PageHolding, int]] = []
        """Holding and the length it was grown to in every sub-pool."""

    @rule(tokens=st.integers(1, PAGE * PAGES))
    def reserve(self, tokens):
        if -(-tokens // PAGE) <= self.memory.free()[0]:
            self.held.append((self.memory.reserve(tokens), 0))

    @rule(data=st.data(), tokens=st.integers(1, PAGE * PAGES))
    def grow(self, data, tokens):
        if not self.held:
            return
        index = data.draw(st.integers(0, len(self.held) - 1))
        holding, length = self.held[index]
        ends = [-(-tokens // PAGE) - pages.end for pages in holding.lists]
        expected = all(more <= free for more, free in zip(ends, self.memory.free(), strict=True))
        assert self.memory.can_grow(holding, tokens) == expected
        if expected:
            self.memory.grow(holding, tokens)
            self.held[index] = (holding, max(length, tokens))

    @rule(data=st.data())
    def pass_positions(self, data):
        if not self.held:
            return
        holding, length = data.draw(st.sampled_from(self.held))
        kv_len = data.draw(st.integers(0, length))
        window = holding.lists[1]
        border = kv_len // PAGE * PAGE
        passed = [page for page in range(window.end) if (page + 1) * PAGE <= border - WINDOW]
        expected = max(window.first, len(passed))

        self.memory.give_up_passed(holding, kv_len)

        assert window.first == expected
        assert window.first * PAGE <= max(0, kv_len - WINDOW + 1) or expected > len(passed)

    @rule(data=st.data())
    def release(self, data):
        if self.held:
            holding, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.memory.release(holding)

    @invariant()
    def pages_are_a_partition(self):
        self.memory.check([holding for holding, _ in self.held])
        for index, free in enumerate(self.memory.free()):
            owned = [page for holding, _ in self.held for page in holding.lists[index].held().tolist()]
            assert len(owned) == len(set(owned))
            assert 0 not in owned
            assert free + len(owned) == PAGES

    @invariant()
    def lengths_are_covered(self):
        for holding, length in self.held:
            assert holding.allocated_len >= length
            assert holding.lists[0].first == 0


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
