"""Pools of one to eight pages, readers that fall behind: whoever still reads is served to the end."""

import random

import pytest

from protos.wire.enums import FinishReason
from scheduler_svc.core.events import ReaderPaused, ReaderResumed, StreamKey
from scheduler_svc.core.request import Request, RequestStatus
from scheduler_svc.core.settings import CoreSettings
from tests.support.core_harness import CoreHarness, make_spec, oracle, small_info

SEEDS = 25
PAGE_SIZE = 2
MOST_STEPS = 600


class TightPool:
    """Some readers stop for good after a while; the oldest of the others is watched."""

    def __init__(self, usable: int, seed: int) -> None:
        self.random = random.Random(usable * 1000 + seed)
        self.harness = CoreHarness(
            CoreSettings(budget_tokens=self.random.choice([2, 4]), new_token_ratio_start=0.0, new_token_ratio_floor=0.0)
        )
        info = small_info(num_pages=usable + 1, page_size=PAGE_SIZE, window=self.random.choice([1, 2]))
        self.harness.attach(info=info)
        capacity = usable * PAGE_SIZE
        for stream_id in range(self.random.randint(2, 7)):
            total = self.random.randint(2, capacity)
            prompt = self.random.randint(1, total - 1)
            self.harness.submit(make_spec(stream_id, prompt=prompt, max_tokens=total - prompt))
        self.paused: set[StreamKey] = set()
        self.retracted_oldest = 0

    @property
    def reading(self) -> list[Request]:
        return [request for stream, request in self.harness.state.streams.items() if stream not in self.paused]

    def pause_some(self) -> None:
        for stream in list(self.harness.state.streams):
            if self.random.random() < 0.15 and len(self.reading) > 1:
                self.paused.add(stream)
                self.harness.step(ReaderPaused(stream))

    def deliver(self) -> None:
        """One result; the oldest request that runs and is read goes on."""
        running = [request for request in self.reading if request.status is not RequestStatus.WAITING]
        oldest = min(running, key=lambda request: request.standing.seniority, default=None)
        if self.harness.pending["w0"]:
            self.harness.deliver()
        else:
            self.harness.step()
        assert oldest is None or oldest.status is not RequestStatus.WAITING, "the oldest was retracted"

    def finish(self) -> None:
        for _ in range(MOST_STEPS):
            if not self.reading:
                return
            self.deliver()
        raise AssertionError("livelock")


@pytest.mark.parametrize("usable", range(1, 9))
def test_readers_that_stopped_are_in_nobodys_way(usable):
    retractions = paused = 0
    for seed in range(SEEDS):
        pool = TightPool(usable, seed)
        for _ in range(6):
            pool.deliver()
            pool.pause_some()
        pool.finish()
        paused += len(pool.paused)
        pool.harness.step(*[ReaderResumed(stream) for stream in pool.paused])
        pool.paused.clear()
        pool.finish()
        retractions += pool.harness.state.counters.retractions

        pool.harness.assert_balanced()
        for stream, spec in pool.harness.specs.items():
            assert pool.harness.outputs[stream] == oracle(pool.harness.infos["w0"], spec)
            assert pool.harness.ends[stream].reason is FinishReason.LENGTH
    assert paused >= SEEDS / 2
    assert retractions >= (0 if usable == 1 else SEEDS / 2)
