"""The ordering protocol under duplicates, gaps, reorders, reopenings and attaches, in any order (I8-I11)."""

from collections import Counter, defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protos.wire.errors import DataFault, StaleEpoch
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult, PlanRejection
from tests.support.plans import INCARNATION, extend, make_identity, make_info, make_limits, make_plan
from worker_svc.protocol.messages import (
    AnswerAttach,
    ArrivedPlan,
    AttachCall,
    EndStream,
    Execute,
    Fence,
    OpenedAnswer,
    PlanResult,
    RefuseAttach,
    Reply,
    ResetExecutor,
    SequenceGapAnswer,
    StaleAnswer,
    StreamOpening,
)
from worker_svc.protocol.worker_protocol import WorkerProtocol

BASE = make_plan([extend(0, 3)])
OTHER_LIFE = bytes(16)
FENCES = st.builds(Fence, st.integers(0, 3), st.integers(0, 3))


class WorkerProtocolMachine(RuleBasedStateMachine):
    """A shell that carries actions out in its own time, beside callers that do what they like."""

    @initialize(window=st.integers(1, 3))
    def start(self, window):
        self.window = window
        self.protocol = WorkerProtocol(make_info(limits=make_limits(window=window, cached_results=window + 2)))
        self.highest = Fence(0, 0)
        self.attached = Fence(0, 0)
        self.accepted = None
        self.out = None
        """What the device was told: a plan, a fence to reset to, or nothing."""
        self.executed = defaultdict(list)
        self.results = {}
        self.expected = 1
        """As a scheduler learns it: from the opening and from what it sent since."""
        self.live_stream = None
        self.stream_number = 0
        self.next_id = 0
        self.sent = set()
        self.sends = Counter()
        self.answers = Counter()
        self.calls = {}
        self.calls_answered = set()
        self.ended = set()

    # --- callers

    @rule(fence=FENCES, name=st.sampled_from(["a", "b"]))
    def attach(self, fence, name):
        self._attach(
            AttachCall(epoch=fence.epoch, term=fence.term, protocol_min=1, protocol_max=1, scheduler_name=name)
        )

    @rule(raise_epoch=st.booleans())
    def attach_higher(self, raise_epoch):
        epoch, term = self.highest
        fence = Fence(epoch + 1, 1) if raise_epoch else Fence(epoch, term + 1)
        self._attach(AttachCall(epoch=fence.epoch, term=fence.term, protocol_min=1, protocol_max=1))

    @precondition(lambda self: self.calls)
    @rule()
    def repeat_last_attach(self):
        self._attach(self.calls[max(self.calls)])

    @rule(raise_number=st.integers(0, 2))
    def open_stream(self, raise_number):
        self._open(self.highest, INCARNATION, self.stream_number + raise_number)

    @rule(fence=FENCES, incarnation=st.sampled_from([INCARNATION, OTHER_LIFE]))
    def open_any_stream(self, fence, incarnation):
        self._open(fence, incarnation, self.stream_number + 1)

    @precondition(lambda self: self.live_stream is None)
    @rule()
    def become_ready(self):
        while self.out is not None:
            self.finish_device_work()
        if self.highest == Fence(0, 0):
            self.attach_higher(raise_epoch=True)
            self.finish_device_work()
        self._open(self.highest, INCARNATION, self.stream_number + 1)

    @precondition(lambda self: self.live_stream is not None)
    @rule(count=st.integers(1, 6))
    def run_plans(self, count):
        for _ in range(count):
            self._send(self.live_stream, self.expected)
            while self.out is not None:
                self.finish_device_work()

    @precondition(lambda self: self.live_stream is not None)
    @rule()
    def send_from_another_life(self):
        self._send(self.live_stream, self.expected, incarnation=OTHER_LIFE)

    @precondition(lambda self: self.live_stream is not None)
    @rule(back=st.integers(0, 3))
    def reopen_and_send_again(self, back):
        self._open(self.highest, INCARNATION, self.stream_number + 1)
        first = max(1, self.expected - back)
        for seq in range(first, first + self.window):
            self._send(self.live_stream, seq)

    @precondition(lambda self: self.live_stream is not None)
    @rule(is_rejected=st.booleans())
    def send_expected(self, is_rejected):
        self._send(self.live_stream, self.expected, is_rejected=is_rejected)

    @precondition(lambda self: self.live_stream is not None)
    @rule(offset=st.integers(-6, 3), is_rejected=st.booleans())
    def send_near(self, offset, is_rejected):
        self._send(self.live_stream, max(0, self.expected + offset), is_rejected=is_rejected)

    @precondition(lambda self: self.next_id)
    @rule(data=st.data(), fence=FENCES, incarnation=st.sampled_from([INCARNATION, OTHER_LIFE]))
    def send_anything_on_any_stream(self, data, fence, incarnation):
        stream = data.draw(st.integers(1, self.next_id))
        if stream not in self.ended:
            self._send(stream, self.expected, fence=fence, incarnation=incarnation)

    @precondition(lambda self: self.live_stream is not None)
    @rule()
    def send_unreadable(self):
        self._carry_out(self.protocol.message_unreadable(self.live_stream, DataFault("crc")))

    @precondition(lambda self: self.live_stream is not None)
    @rule()
    def finish_sending(self):
        stream = self.live_stream
        self._carry_out(self.protocol.requests_ended(stream))
        while self.out is not None:
            self.finish_device_work()
        assert stream in self.ended
        for (sender, seq), sent in self.sends.items():
            if sender == stream:
                assert 1 <= self.answers[stream, seq] <= sent

    @precondition(lambda self: self.live_stream is not None)
    @rule()
    def lose_stream(self):
        stream, self.live_stream = self.live_stream, None
        self.ended.add(stream)
        self._carry_out(self.protocol.stream_closed(stream))

    # --- the device

    @precondition(lambda self: self.out is not None)
    @rule()
    def finish_device_work(self):
        out, self.out = self.out, None
        if isinstance(out, ForwardPlan):
            self._carry_out(self.protocol.plan_finished(ForwardResult(identity=out.identity)))
        else:
            self._carry_out(self.protocol.executor_reset())

    @rule()
    def settle(self):
        """Once the device is idle, everything sent on the open stream and every attach call was answered."""
        while self.out is not None:
            self.finish_device_work()
        assert self.calls_answered == set(self.calls)
        for (stream, seq), sent in self.sends.items():
            if stream == self.live_stream:
                assert 1 <= self.answers[stream, seq] <= sent

    def teardown(self):
        if hasattr(self, "out"):
            self.settle()

    # --- what must hold

    @invariant()
    def each_plan_ran_once_and_in_order(self):
        for seqs in getattr(self, "executed", {}).values():
            assert seqs == sorted(set(seqs))

    def _attach(self, asked):
        self.next_id += 1
        self.calls[self.next_id] = asked
        previous = self.highest
        is_refused = asked.fence <= self.highest and asked != self.accepted
        if asked.fence > self.highest:
            self.accepted = asked
            self.highest = asked.fence
            self.stream_number = 0
            self.expected = 1
        actions = self.protocol.attach_requested(self.next_id, asked)
        if is_refused:
            assert isinstance(actions[0].error, StaleEpoch)
            assert (actions[0].error.highest_epoch, actions[0].error.highest_term) == previous
        self._carry_out(actions)

    def _open(self, fence, incarnation, number):
        self.next_id += 1
        is_attached = Fence(0, 0) < fence == self.attached == self.highest
        is_right = is_attached and incarnation == INCARNATION
        is_accepted = is_right and number > self.stream_number
        actions = self.protocol.stream_opened(
            self.next_id,
            StreamOpening(epoch=fence.epoch, term=fence.term, incarnation=incarnation, stream_number=number),
        )
        assert is_accepted == any(isinstance(action, Reply) for action in actions)
        if is_accepted:
            self.stream_number = number
        self._carry_out(actions)

    def _send(self, stream, seq, *, is_rejected=False, fence=None, incarnation=INCARNATION):
        fence = fence or self.attached
        named = make_identity(seq=seq, epoch=fence.epoch, term=fence.term, incarnation=incarnation)
        rejection = PlanRejection(reason="INVALID_PLAN", field="rows", row=None, message="m")
        content = (
            rejection
            if is_rejected
            else ForwardPlan(
                identity=named, forwards=BASE.forwards, rows=BASE.rows, tokens=BASE.tokens, page_tables=BASE.page_tables
            )
        )
        self.sends[stream, seq] += 1
        self.sent.add((fence, seq))
        if stream == self.live_stream and seq == self.expected:
            self.expected += 1
        self._carry_out(self.protocol.plan_received(stream, ArrivedPlan(named, content)))

    def _carry_out(self, actions):
        for action in actions:
            TAKERS[type(action)](self, action)

    def _start_plan(self, action):
        named = action.plan.identity
        assert self.out is None
        assert named.incarnation == INCARNATION
        fence = Fence(named.epoch, named.term)
        assert fence == self.attached == self.highest
        assert named.seq == 1 or (fence, named.seq - 1) in self.sent
        self.executed[fence].append(named.seq)
        self.out = action.plan

    def _start_reset(self, action):
        assert self.out is None
        assert action.fence == self.highest
        self.out = action.fence

    def _take_answer(self, action):
        assert action.call not in self.calls_answered
        assert self.calls[action.call].fence == self.highest
        self.attached = self.highest
        self.calls_answered.add(action.call)

    def _take_refusal(self, action):
        assert action.call not in self.calls_answered
        self.calls_answered.add(action.call)

    def _take_end(self, action):
        assert action.stream not in self.ended
        self.ended.add(action.stream)
        if action.stream == self.live_stream:
            self.live_stream = None

    def _take_reply(self, action):
        assert action.stream not in self.ended
        body = action.body
        if isinstance(body, OpenedAnswer):
            assert self.live_stream is None, "one stream at a time"
            self.live_stream = action.stream
            self.expected = body.expected_seq
            if isinstance(self.out, ForwardPlan):
                assert body.expected_seq == self.out.identity.seq + 1, "what has not started is expected again"
            return
        assert action.stream == self.live_stream
        if isinstance(body, PlanResult):
            self._take_result(body.result)
        assert self.sends[action.stream, self._seq(body)], "answers only what this stream sent"
        self.answers[action.stream, self._seq(body)] += 1

    def _take_result(self, result):
        named = result.identity
        key = (Fence(named.epoch, named.term), named.seq)
        assert key[0] == self.attached
        assert self.results.setdefault(key, result) is result, "a stored result never changes"
        assert (key[1] in self.executed[key[0]]) == (result.rejection is None)

    def _seq(self, body):
        if isinstance(body, PlanResult):
            return body.result.identity.seq
        if isinstance(body, SequenceGapAnswer):
            return body.received_seq
        assert isinstance(body, StaleAnswer)
        assert body.seq == 0 or body.seq + self.window + 2 < body.expected_seq, "the last results are kept"
        return body.seq


TAKERS = {
    Execute: WorkerProtocolMachine._start_plan,
    ResetExecutor: WorkerProtocolMachine._start_reset,
    AnswerAttach: WorkerProtocolMachine._take_answer,
    RefuseAttach: WorkerProtocolMachine._take_refusal,
    EndStream: WorkerProtocolMachine._take_end,
    Reply: WorkerProtocolMachine._take_reply,
}

TestWorkerProtocolMachine = WorkerProtocolMachine.TestCase
TestWorkerProtocolMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
