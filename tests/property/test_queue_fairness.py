"""Nobody starves: what domains are given side by side, and who overtakes whom within one, over long random queues.

Between two domains that both wait, the difference of what they are given stays below the largest request of each, over
any stretch of time (the bound of start-time fair queueing). Within a domain a later request goes first only as far as
its priority is worth its lateness.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from scheduler_svc.core.events import ReaderPaused, ReaderResumed, StreamKey
from scheduler_svc.core.request import Request, RequestStatus
from scheduler_svc.core.settings import CoreSettings, PolicyKind
from scheduler_svc.core.waiting_queue import WaitingQueue
from tests.support.core_harness import CoreHarness, make_spec, oracle, small_info

TURNS = 1500
LEAST_STEPS = 7_500
AGING_S = 5.0
DOMAINS = (b"greedy", b"one at a time", b"bursts", b"now and then")
MOST_PROMPT, MOST_OUTPUT = 9, 3
MOST_TOKENS = MOST_PROMPT + MOST_OUTPUT


@dataclass
class Rivals:
    """Two domains, and how the difference of their tokens moves while both wait."""

    difference: float = 0.0
    least: float = 0.0
    most: float = 0.0

    def add(self, tokens: float) -> None:
        self.difference += tokens
        self.least, self.most = min(self.least, self.difference), max(self.most, self.difference)


@dataclass
class Referee:
    """Sees every placement in order, with the queue as it was."""

    policy: PolicyKind
    rivals: dict[tuple[bytes, bytes], Rivals] = field(default_factory=dict)
    placed: Counter[bytes] = field(default_factory=Counter)
    overtaken: int = 0

    def place(self, queue: WaitingQueue, request: Request, tokens: float) -> None:
        assert tokens <= MOST_TOKENS
        domain = request.spec.isolation_domain
        self.placed[domain] += 1
        waiting = [one for one in queue if not one.standing.is_paused]
        contending = {one.spec.isolation_domain for one in waiting}
        for pair in itertools.permutations(DOMAINS, 2):
            if not contending.issuperset(pair):
                self.rivals.pop(pair, None)
            elif domain == pair[0]:
                self.rivals.setdefault(pair, Rivals()).add(tokens)
            elif domain == pair[1]:
                self.rivals.setdefault(pair, Rivals()).add(-tokens)
        for rivals in self.rivals.values():
            assert rivals.most - rivals.least <= 2 * MOST_TOKENS
        for other in waiting:
            if other.spec.isolation_domain == domain:
                self._check_order(request, other)

    def _check_order(self, first: Request, other: Request) -> None:
        """That `first` may go before `other`, which waits in the same domain."""
        if self.policy is PolicyKind.FCFS:
            assert (not first.standing.has_run, first.standing.seniority) <= (
                not other.standing.has_run,
                other.standing.seniority,
            )
            return
        lateness = first.standing.queued_at - other.standing.queued_at
        assert lateness <= AGING_S * (first.spec.priority - other.spec.priority)
        self.overtaken += lateness > 0


class Rush:
    """More requests than rows, from domains of different habits."""

    def __init__(self, seed: int, policy: PolicyKind) -> None:
        self.random = random.Random(seed)
        self.policy = policy
        self.harness = CoreHarness(
            CoreSettings(
                budget_tokens=64,
                schedule_policy=policy,
                priority_aging_s=AGING_S,
                new_token_ratio_start=1.0,
                new_token_ratio_floor=1.0,
            )
        )
        self.harness.attach(info=small_info(num_pages=200, max_rows=self.random.choice([1, 2, 3])))
        self.next_stream = 1
        self.paused: list[StreamKey] = []

    def turn(self) -> None:
        harness, rng = self.harness, self.random
        harness.now += rng.choice([0, 1])
        waiting = Counter(request.spec.isolation_domain for request in harness.state.waiting)
        self._submit(b"greedy", 6 - waiting[b"greedy"])
        self._submit(b"one at a time", 1 - waiting[b"one at a time"])
        self._submit(b"bursts", rng.randint(1, 12) if rng.random() < 0.02 else 0)
        self._submit(b"now and then", int(rng.random() < 0.05))
        if rng.random() < 0.05:
            self._pause_or_cancel()
        if self.paused and rng.random() < 0.05:
            harness.step(ReaderResumed(self.paused.pop(rng.randrange(len(self.paused)))))
        if harness.pending["w0"]:
            harness.deliver()

    def settle(self) -> None:
        self.harness.step(*[ReaderResumed(stream) for stream in self.paused])
        self.harness.run()
        self.harness.assert_balanced()

    def _submit(self, domain: bytes, count: int) -> None:
        for _ in range(count):
            rng = self.random
            spec = make_spec(
                self.next_stream,
                prompt=[rng.randrange(97) for _ in range(rng.randint(1, MOST_PROMPT))],
                max_tokens=rng.randint(1, MOST_OUTPUT),
                isolation_domain=domain,
                priority=rng.choice([-2, 0, 0, 1, 3]) if self.policy is PolicyKind.PRIORITY else 0,
            )
            self.next_stream += 1
            self.harness.submit(spec)

    def _pause_or_cancel(self) -> None:
        streams = list(self.harness.state.streams)
        stream = self.random.choice(streams)
        if self.random.random() < 0.5:
            self.harness.cancel(stream.stream_id)
            return
        self.harness.step(ReaderPaused(stream))
        self.paused.append(stream)


@pytest.mark.parametrize("policy", [PolicyKind.FCFS, PolicyKind.PRIORITY])
def test_nobody_starves(policy, monkeypatch):
    steps, overtaken = 0, 0
    real = WaitingQueue.remove_placed
    for seed in range(3):
        referee, rush = Referee(policy), Rush(seed, policy)

        def noting(queue: WaitingQueue, request: Request, *, tokens: float, referee: Referee = referee) -> None:
            referee.place(queue, request, tokens)
            real(queue, request, tokens=tokens)

        monkeypatch.setattr(WaitingQueue, "remove_placed", noting)
        for _ in range(TURNS):
            rush.turn()
            assert all(request.status is RequestStatus.WAITING for request in rush.harness.state.waiting)
        rush.settle()
        for stream, spec in rush.harness.specs.items():
            got = rush.harness.outputs.get(stream, [])
            assert got == oracle(rush.harness.infos["w0"], spec)[: len(got)]
        steps += rush.harness.steps
        overtaken += referee.overtaken
        assert min(referee.placed[domain] for domain in DOMAINS) >= 10, referee.placed
    print(f"\n{policy}: {steps} steps, {overtaken} later requests went first")
    assert steps >= LEAST_STEPS
    assert (overtaken > 100) == (policy is PolicyKind.PRIORITY)
