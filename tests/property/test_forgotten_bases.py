"""A worker may forget its delta bases at any plan: one plan comes in full under the same seq, nothing else changes."""

import random
from collections import deque
from dataclasses import replace

import pytest

from protos.forwardplane.v1.worker_pb2 import PlanMessage
from protos.wire.digest import plan_digest
from protos.wire.enums import Feature
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from scheduler_svc.links.unanswered import UnansweredPlans
from tests.property.test_core_simulation import Life
from worker_svc.protocol.messages import (
    AttachCall,
    Execute,
    NeedFullAnswer,
    PlanResult,
    Reply,
    SequenceGapAnswer,
    StreamOpening,
)
from worker_svc.protocol.worker_protocol import WorkerProtocol
from worker_svc.rpc.plan_intake import PlanIntake

STREAM = 1
TURNS = 60


class Channel:
    """A scheduler's unanswered plans, a worker's intake and its protocol, with a stream between; nothing is lost."""

    def __init__(self, info, first: ForwardPlan, *, loses=lambda seq: False) -> None:
        self.info = replace(info, features=info.features | {Feature.DELTAS}, incarnation=first.identity.incarnation)
        self.unanswered = UnansweredPlans(self.info, min_delta_bytes=0)
        self.intake = PlanIntake(self.info, lambda: 0, lambda plan, _: lambda: ForwardResult(identity=plan.identity))
        self.protocol = WorkerProtocol(self.info)
        self.loses = loses
        self.stream: deque = deque()
        self.executing: Execute | None = None
        self.executed: list[ForwardPlan] = []
        self.sent: list[tuple[int, bool]] = []
        self.answers: list[object] = []
        identity = first.identity
        self.protocol.attach_requested(
            1, AttachCall(epoch=identity.epoch, term=identity.term, protocol_min=1, protocol_max=1)
        )
        self.protocol.executor_reset()
        self.protocol.stream_opened(
            STREAM,
            StreamOpening(epoch=identity.epoch, term=identity.term, incarnation=identity.incarnation, stream_number=1),
        )

    def send(self, messages) -> None:
        for message in messages:
            self.sent.append((message.seq, message.is_delta))
            if not self.loses(message.seq):
                self.stream.append(message)

    def arrive(self) -> None:
        message = self.stream.popleft()
        arrived = self.intake.read(PlanMessage(body=message.body, crc32=message.crc32))
        self._carry_out(self.protocol.plan_received(STREAM, arrived))

    def finish(self) -> None:
        done, self.executing = self.executing, None
        self.executed.append(done.plan)
        self._carry_out(self.protocol.plan_finished(done.run()))

    def _carry_out(self, actions) -> None:
        for action in actions:
            if isinstance(action, Execute):
                self.executing = action
                continue
            assert isinstance(action, Reply)
            self.answers.append(action.body)
            match action.body:
                case NeedFullAnswer(seq):
                    self.send(self.unanswered.in_full(seq))
                case SequenceGapAnswer(expected_seq, _):
                    self.send(self.unanswered.again(expected_seq))
                case PlanResult(result):
                    self.unanswered.answered(result.identity.seq, was_refused=result.rejection is not None)

    def run(self, plans, *, draw, forgets=lambda seq: False) -> None:
        """All plans, at most two in flight, with deliveries at random moments."""
        waiting, results = deque(plans), 0
        while results < len(plans):
            in_flight = len(plans) - len(waiting) - results
            moves = []
            if waiting and in_flight < self.info.limits.window:
                moves.append("send")
            if self.stream:
                moves.append("arrive")
            if self.executing:
                moves.append("finish")
            move = draw.choice(moves)
            if move == "send":
                plan = waiting.popleft()
                if forgets(plan.identity.seq):
                    self.intake.bases.forget()
                self.send([self.unanswered.add(plan)])
            elif move == "arrive":
                self.arrive()
            else:
                self.finish()
            results = sum(isinstance(answer, PlanResult) for answer in self.answers)


def lives():
    for seed in range(4):
        life = Life(seed)
        life.rates["lose"] = life.rates["reject"] = 0
        for _ in range(TURNS):
            life.turn()
        life.settle()
        plans = [plan for worker, plan in life.harness.plans if worker == life.names[0]][:60]
        if len(plans) > 20:
            yield life.info, plans


LIVES = list(lives())


def run(info, plans, *, seed, **options):
    channel = Channel(info, plans[0])
    channel.run(plans, draw=random.Random(seed), **options)
    assert [plan_digest(plan) for plan in channel.executed] == [plan_digest(plan) for plan in plans]
    return channel


def test_most_plans_travel_as_changes():
    deltas = [is_delta for info, plans in LIVES for _, is_delta in run(info, plans, seed=1).sent]
    assert len(LIVES) >= 3
    assert sum(deltas) > 0.5 * len(deltas)


@pytest.mark.parametrize("index", range(len(LIVES)))
def test_forgetting_at_any_one_plan_sends_that_plan_in_full_under_its_seq(index):
    info, plans = LIVES[index]
    usual = run(info, plans, seed=1)
    was_delta = dict(usual.sent)
    for seq in range(2, len(plans) + 1, 7):
        channel = run(info, plans, seed=seq, forgets=lambda at, seq=seq: at == seq)
        wanted = [answer.seq for answer in channel.answers if isinstance(answer, NeedFullAnswer)]
        assert len(wanted) <= 1
        in_full = {of for of, is_delta in channel.sent if not is_delta}
        assert in_full == {of for of, is_delta in usual.sent if not is_delta} | set(wanted)
        for of in wanted:
            assert was_delta[of]
            assert 0 <= seq - of < info.limits.window, "the one on its way, or the one just built"


def test_forgetting_at_random_all_the_time():
    draw = random.Random(4)
    nacks = 0
    for seed in range(2):
        for info, plans in LIVES:
            channel = run(info, plans, seed=seed, forgets=lambda _: draw.random() < 0.4)
            nacks += sum(isinstance(answer, NeedFullAnswer) for answer in channel.answers)
    assert nacks > 15


def test_a_plan_that_is_lost_on_the_way_is_sent_again_with_all_behind_it():
    gaps = 0
    for info, plans in LIVES:
        if info.limits.window < 2:
            continue
        lost = set(range(3, len(plans) - 1, 5))

        def loses(seq, lost=lost):
            if seq in lost:
                lost.remove(seq)
                return True
            return False

        channel = Channel(info, plans[0], loses=loses)
        _run_with_losses(channel, plans)
        assert [plan_digest(plan) for plan in channel.executed] == [plan_digest(plan) for plan in plans]
        gaps += sum(isinstance(answer, SequenceGapAnswer) for answer in channel.answers)
    assert gaps > 5


def _run_with_losses(channel, plans):
    """Full windows: a lost plan shows when the one behind it arrives."""
    waiting, results = deque(plans), 0
    while results < len(plans):
        while waiting and len(plans) - len(waiting) - results < channel.info.limits.window:
            channel.send([channel.unanswered.add(waiting.popleft())])
        while channel.stream:
            channel.arrive()
        if channel.executing:
            channel.finish()
        results = sum(isinstance(answer, PlanResult) for answer in channel.answers)
