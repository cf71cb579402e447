"""Random lives of a scheduler: whatever happens, every stream gets exactly the tokens of an undisturbed run."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from protos.wire.codec import encode_plan
from protos.wire.enums import Feature, FinishReason, RowFailure
from protos.wire.limits import MAX_PLAN_BYTES
from protos.wire.plan import ForwardPlan
from protos.wire.result import PlanRejection
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.events import (
    CacheFlushRequested,
    Grammar,
    ReaderPaused,
    ReaderResumed,
    RequestRefused,
    RequestSpec,
    ResultReceived,
    Sampling,
    StreamKey,
)
from scheduler_svc.core.request import RequestStatus
from scheduler_svc.core.settings import CoreSettings, PolicyKind
from tests.support.core_harness import NEVER, CoreHarness, make_spec, oracle, small_info
from tests.support.plans import CORE_FEATURES, full_sub_pool, window_sub_pool

OTHER_EVENTS = ("pauses", "hit_tokens", "evicted_pages")
SEEDS = 40
TURNS = 80
FAULTS = ("retractions", "migrations", "failed_rows", "rejected_plans", "late_rows", "late_results")

RULES = ("penalties", "masks")


class Life:
    """One seed: a topology, a workload and faults, drawn so that some seeds lack some faults."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.harness = CoreHarness(self._settings())
        self.info = self._info()
        self.names = [f"w{index}" for index in range(self.random.choice([1, 1, 2, 3]))]
        self.next_stream = 1
        self.paused: set[StreamKey] = set()
        self.pauses = 0
        self.rates = {
            name: self.random.choice([0, 0.02, 0.1])
            for name in ("cancel", "lose", "deadline", "nan", "reject", "flush", "pause")
        }
        self.calm = False
        self.late: list[ResultReceived] = []
        self.harness.fail_row = self._failure
        self.harness.reject = self._rejection

    @property
    def has_priorities(self) -> bool:
        return self.harness.state.settings.schedule_policy is PolicyKind.PRIORITY

    def _settings(self) -> CoreSettings:
        return CoreSettings(
            budget_tokens=self.random.choice([4, 8, 16, 64]),
            new_token_ratio_start=self.random.choice([0.0, 0.7]),
            new_token_ratio_floor=0.0,
            schedule_policy=self.random.choice(list(PolicyKind)),
            data_fault_retries=10_000,
            row_retries=10_000,
        )

    def _info(self) -> WorkerInfo:
        page_size = self.random.choice([1, 2, 4, 8])
        num_pages = 1 + max(2, self.random.choice([8, 16, 24, 64, 128]) // page_size)
        pools = [full_sub_pool(num_pages=num_pages, page_size=page_size)]
        features = CORE_FEATURES | {Feature.WINDOW_SUB_POOL}
        if self.random.random() < 0.3:
            pages = self.random.choice([max(3, num_pages // 2), num_pages, 200])
            pools.append(window_sub_pool(num_pages=pages, page_size=page_size, window_tokens=6))
        if self.random.random() < 0.2:
            features -= {Feature.TOKEN_REFERENCES}
        return small_info(
            sub_pools=tuple(pools),
            features=features,
            window=self.random.choice([1, 2, 3]),
            max_rows=self.random.choice([1, 4, 64, 64]),
            max_tokens=page_size + self.random.choice([1, 5, 100]),
            max_plan_bytes=self.random.choice([MAX_PLAN_BYTES, MAX_PLAN_BYTES, 3000, 4000]),
        )

    def _failure(self, plan: ForwardPlan, row: int) -> RowFailure | None:
        if self.calm or self.random.random() >= self.rates["nan"]:
            return None
        return self.random.choice([RowFailure.NAN, RowFailure.CANARY, RowFailure.LIMIT])

    def _rejection(self, plan: ForwardPlan) -> PlanRejection | None:
        if self.calm or self.random.random() >= self.rates["reject"]:
            return None
        return PlanRejection(reason="INVALID_PLAN", field="rows", row=None, message="refused")

    def spec(self) -> RequestSpec:
        full = (self.info.sub_pools[0].num_pages - 1) * self.info.sub_pools[0].page_size
        capacity = min(full, *(facts.capacity.tokens for facts in self.harness.state.known.values()))
        total = min(self.random.choice([capacity, self.random.randint(2, capacity)]), 32)
        prompt = self.random.randint(1, max(1, self.random.choice([total // 4, total - 1])))
        sampling = Sampling()
        if self.random.random() < 0.5:
            sampling = Sampling(temperature=0.5, seed=self.random.getrandbits(64), top_k=self.random.choice([0, 5]))
        sampling = replace(sampling, **self._rules())
        dies = self.random.random() < self.rates["deadline"]
        spec = make_spec(
            self.next_stream,
            prompt=self._prompt(prompt),
            priority=self.random.choice([0, 0, 1, -3]) if self.has_priorities else 0,
            isolation_domain=self.random.choice([b"", b"", b"other"]),
            max_tokens=min(total - prompt, 24),
            sampling=sampling,
            stop_token_ids=frozenset(self.random.sample(range(97), self.random.choice([0, 4, 8]))),
            min_tokens=self.random.choice([0, 2]),
            grammar=Grammar("regex", "." * self.random.randint(1, 9)) if self.random.random() < 0.2 else None,
            deadline_s=self.harness.now + self.random.randint(1, 30) if dies else NEVER,
        )
        self.next_stream += 1
        return spec

    def _prompt(self, length: int) -> list[int]:
        """Often the beginning of one of two books, sometimes with an end of its own."""
        if self.random.random() < 0.3:
            return [self.random.randrange(97) for _ in range(length)]
        step = self.random.choice([7, 11])
        tail = self.random.choice([0, 0, 1, 3])
        shared = [(step * position) % 97 for position in range(length - min(tail, length))]
        return shared + [self.random.randrange(97) for _ in range(length - len(shared))]

    def _rules(self) -> dict[str, object]:
        """Some of the things that change logits, or none."""
        ids = self.random.sample(range(97), 12)
        rules = {
            "repetition_penalty": self.random.choice([0.5, 1.25]),
            "frequency_penalty": self.random.choice([-1.0, 0.5]),
            "presence_penalty": 1.5,
            "sample_index": self.random.randrange(16),
            "bias": ((ids[0], 3.0), (ids[1], -100.0)),
            "allowed_ids": tuple(self.random.sample(range(97), 60)),
            "banned_ids": tuple(ids[2:]),
        }
        rate = self.random.choice([0, 0, 0.3])
        return {name: value for name, value in rules.items() if self.random.random() < rate}

    def turn(self) -> None:
        harness = self.harness
        if harness.masks and self.random.random() < 0.7:
            harness.answer_mask()
        harness.now += 1
        attached = list(harness.workers)
        for name in self.names:
            if name not in attached and self.random.random() < 0.3:
                harness.attach(name, self.info)
        if harness.state.known and self.random.random() < 0.3:
            harness.submit(*[self.spec() for _ in range(self.random.choice([1, 1, 4]))])
        if harness.state.streams and self.random.random() < self.rates["cancel"]:
            stream = self.random.choice(list(harness.state.streams))
            harness.cancel(stream.stream_id, self.random.choice([FinishReason.ABORT, FinishReason.STOP]))
        if attached and self.random.random() < self.rates["lose"]:
            self._lose(self.random.choice(attached))
        if harness.state.streams and self.random.random() < self.rates["pause"]:
            self._pause_or_resume()
        if self.random.random() < self.rates["flush"]:
            harness.step(CacheFlushRequested(0))
        if self.late and self.random.random() < 0.3:
            harness.step(self.late.pop())
        busy = [name for name in harness.workers if harness.pending[name]]
        if busy:
            harness.deliver(self.random.choice(busy))
        else:
            harness.step()

    def _pause_or_resume(self) -> None:
        stream = self.random.choice(list(self.harness.state.streams))
        if stream in self.paused:
            self.paused.remove(stream)
            self.harness.step(ReaderResumed(stream))
        else:
            self.paused.add(stream)
            self.harness.step(ReaderPaused(stream))
            self.pauses += 1

    def _lose(self, name: str) -> None:
        """Lose a worker whose results are still on their way."""
        while self.harness.pending[name]:
            self.late.append(ResultReceived(name, self.harness.execute(name)))
        self.harness.lose(name)

    def other_events(self) -> dict[str, int]:
        """What happened that is not a fault."""
        state = self.harness.state
        evicted = sum(worker.evicted_pages for worker in state.gauges().workers)
        cache = state.counters.cache
        return {"pauses": self.pauses, "hit_tokens": cache.hit_tokens, "evicted_pages": cache.evicted_pages + evicted}

    def settle(self) -> None:
        """No more faults: everything that is left must end."""
        self.calm = True
        self.harness.step(*[ReaderResumed(stream) for stream in self.paused])
        for name in self.names:
            if name not in self.harness.workers:
                self.harness.attach(name, self.info)
        self.harness.run()
        self.harness.now += 100
        self.harness.step()


def _live(seed: int) -> Life:
    life = Life(seed)
    for _ in range(TURNS):
        life.turn()
    life.settle()
    return life


def _check_streams(life: Life) -> None:
    life.harness.assert_balanced()
    for stream, spec in life.harness.specs.items():
        end, got = life.harness.ends[stream], life.harness.outputs.get(stream, [])
        whole = oracle(life.info, spec)
        if isinstance(end, RequestRefused):
            assert (end.error.reason, end.error.field) == ("QUEUE_FULL", "deadline")
            assert spec.deadline_s < NEVER
            assert not got
            continue
        assert got == whole[: len(got)]
        assert (end.usage.prompt_tokens, end.usage.output_tokens) == (len(spec.prompt_ids), len(got))
        assert 0 <= end.usage.cached_tokens < len(spec.prompt_ids)
        if end.stop_token_id is not None or end.reason is FinishReason.LENGTH:
            assert got == whole


def test_every_stream_gets_the_tokens_of_an_undisturbed_run():
    """And the run had what it claims to survive."""
    faults: Counter[str] = Counter()
    ends: Counter[FinishReason] = Counter()
    used: Counter[str] = Counter()
    for seed in range(SEEDS):
        try:
            life = _live(seed)
            _check_streams(life)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        counters = life.harness.state.counters
        ends.update(counters.finished)
        faults.update({name: getattr(counters, name) for name in FAULTS})
        faults.update(life.other_events())
        for _, plan in life.harness.plans:
            used.update(name for name in RULES if getattr(plan, name) is not None)
            used["bias"] += plan.sampling is not None and plan.sampling.bias_ids is not None
            used["references beside penalties"] += plan.penalties is not None and plan.tokens.sources is not None
    assert all(faults[name] >= 10 for name in (*FAULTS, *OTHER_EVENTS)), faults
    assert len(used) == 4, used
    assert all(count >= 10 for count in used.values()), used
    assert all(ends[reason] >= 10 for reason in FinishReason if reason is not FinishReason.ERROR), ends


@pytest.mark.parametrize("seed", [3, 17])
def test_the_same_events_give_the_same_plans_byte_for_byte(seed):
    def plans() -> list[tuple[str, bytes]]:
        return [(worker, encode_plan(plan)) for worker, plan in _live(seed).harness.plans]

    first = plans()
    assert len(first) > 50
    assert first == plans()


@hypothesis_settings(max_examples=150)
@given(
    usable=st.integers(1, 8),
    window=st.sampled_from([1, 2]),
    budget=st.sampled_from([2, 4, 8]),
    sizes=st.lists(st.tuples(st.integers(1, 17), st.integers(1, 17)), min_size=1, max_size=8),
    at_capacity=st.lists(st.sampled_from([-1, 0, 1]), max_size=3),
    shares=st.booleans(),
    windowed=st.none() | st.integers(1, 12),
)
def test_tight_pools_refuse_or_finish_everything(usable, window, budget, sizes, at_capacity, shares, windowed):
    """One request can hold all that is reported as capacity, of which the scarcer sub-pool decides."""
    page_size = 2
    info = small_info(num_pages=usable + 1, page_size=page_size, window=window)
    if windowed is not None:
        hybrid = window_sub_pool(num_pages=windowed + 1, page_size=page_size, window_tokens=3)
        features = info.features | {Feature.WINDOW_SUB_POOL}
        info = replace(info, sub_pools=(*info.sub_pools, hybrid), features=features)
    harness = CoreHarness(CoreSettings(budget_tokens=budget))
    harness.attach(info=info)
    capacity = harness.state.workers["w0"].memory.capacity.tokens
    assert capacity <= usable * page_size
    assert windowed is not None or capacity == usable * page_size
    sizes = sizes + [(max(1, capacity // 2), capacity - max(1, capacity // 2) + off) for off in at_capacity]

    book = [(7 * position) % 97 for position in range(64)]
    specs = [
        make_spec(i, prompt=book[:prompt] if shares else prompt, max_tokens=more)
        for i, (prompt, more) in enumerate(sizes)
        if more > 0
    ]
    harness.submit(*specs)
    _run_and_watch_the_oldest(harness)

    harness.assert_balanced()
    assert harness.state.counters.failed_rows == 0
    for spec in specs:
        end = harness.ends[spec.stream]
        if len(spec.prompt_ids) + spec.max_tokens > capacity:
            assert isinstance(end, RequestRefused)
            assert end.error.reason == "NEVER_FITS"
        else:
            assert harness.outputs[spec.stream] == oracle(info, spec)


def _run_and_watch_the_oldest(harness: CoreHarness) -> None:
    """Without faults, the oldest running request goes on until it ends, and some plan advances it."""
    for _ in range(2000):
        if not harness.pending["w0"]:
            return
        running = list(harness.state.workers["w0"].running.values())
        oldest = min(running, key=lambda request: request.handle) if running else None
        harness.deliver()
        if oldest is not None:
            assert oldest.status is not RequestStatus.WAITING, "the oldest running request was retracted"
    raise AssertionError("livelock")
