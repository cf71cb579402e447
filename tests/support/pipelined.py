"""The scheduling core and a worker with everything between them but sockets, in one process and without real time.

Plans go through the link's exchange (changes, resends), bytes, the worker's intake (decode, validate, stage) and its
ordering protocol to the executor; results come back as bytes. The stream may break and bases may be forgotten.
"""

import random
from collections import deque

from protos.forwardplane.v1.worker_pb2 import PlanMessage
from protos.wire.codec import decode_result, encode_result
from protos.wire.errors import ConnectionLost
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.links.exchange import PlanExchange
from scheduler_svc.links.link_messages import EncodedPlan, FullPlanNeeded, PlansMissing, Term
from scheduler_svc.links.liveness import Liveness, LivenessLimits
from scheduler_svc.links.recorder import PlanRecorder
from tests.support.core_on_executor import AroundExecutor
from worker_svc.executor import StagingExecutor
from worker_svc.protocol.messages import (
    AttachCall,
    Execute,
    NeedFullAnswer,
    OpenedAnswer,
    PlanResult,
    Reply,
    ReplyBody,
    SequenceGapAnswer,
    StreamOpening,
)
from worker_svc.protocol.worker_protocol import WorkerProtocol
from worker_svc.rpc.plan_intake import PlanIntake

LIMITS = LivenessLimits(report_late_s=1e9, report_lost_s=1e9, plan_timeout_s=1e9)


class WiredWorker:
    """Both ends of one term. `sent` and `next_result` are the core's side."""

    def __init__(self, executor: StagingExecutor, term: Term, recorder: PlanRecorder | None = None) -> None:
        self.deltas = 0
        self.full_plans = 0
        self.needed_full = 0
        self.resent = 0
        self.plan_bytes: list[tuple[bool, int, int]] = []
        """(is a delta, bytes, rows) of each plan as it was first sent."""
        executor.reset()
        self._term = term
        self._recorder = recorder
        self._intake = PlanIntake(term.info, lambda: 0, executor.stage)
        self._protocol = WorkerProtocol(term.info)
        self._exchange = PlanExchange(term, liveness=Liveness(LIMITS, now=0.0), min_delta_bytes=0, reopen_s=1e9)
        self._stream = 0
        self._to_worker: deque[EncodedPlan] = deque()
        self._results: deque[ForwardResult] = deque()
        self._executing: Execute | None = None
        if recorder is not None:
            recorder.attached(term.worker, epoch=term.epoch, term=term.term, info=term.info)
        self._protocol.attach_requested(1, AttachCall(epoch=term.epoch, term=term.term, protocol_min=1, protocol_max=1))
        self._protocol.executor_reset()
        self._open()

    def sent(self, plan: ForwardPlan) -> None:
        """The core sends a plan."""
        if self._recorder is not None:
            self._recorder.plan_sent(self._term.worker, plan)
        message = self._exchange.send(plan, 0.0)
        self.deltas += message.is_delta
        self.full_plans += not message.is_delta
        self.plan_bytes.append((message.is_delta, len(message.body), plan.rows.num_rows))
        self._to_worker.append(message)

    def arrive(self) -> None:
        """The oldest plan on its way reaches the worker."""
        if self._to_worker:
            message = self._to_worker.popleft()
            arrived = self._intake.read(PlanMessage(body=message.body, crc32=message.crc32))
            self._carry_out(self._protocol.plan_received(self._stream, arrived))

    def finish(self) -> None:
        """The device ends its plan."""
        if self._executing is not None:
            done, self._executing = self._executing, None
            self._carry_out(self._protocol.plan_finished(done.run()))

    def forget_bases(self) -> None:
        self._intake.bases.forget()

    def break_stream(self) -> None:
        """The network ends the stream: what is on its way is lost, and a new one is opened."""
        self._to_worker.clear()
        self._protocol.stream_closed(self._stream)
        assert self._exchange.broke(ConnectionLost("broken"), 0.0) is None
        self._open()

    def next_result(self) -> ForwardResult:
        """The result that is due, after whatever it takes."""
        while not self._results:
            assert self._to_worker or self._executing, "nothing is on its way"
            self.arrive()
            self.finish()
        return self._results.popleft()

    def _open(self) -> None:
        opening = self._exchange.next_opening()
        self._stream = opening.stream_number
        term = self._term
        message = StreamOpening(
            epoch=term.epoch, term=term.term, incarnation=term.info.incarnation, stream_number=self._stream
        )
        self._carry_out(self._protocol.stream_opened(self._stream, message))

    def _carry_out(self, actions) -> None:
        for action in actions:
            if isinstance(action, Execute):
                self._executing = action
            else:
                assert isinstance(action, Reply), action
                if action.stream == self._stream:
                    self._take(action.body)

    def _take(self, body: ReplyBody) -> None:
        match body:
            case OpenedAnswer(expected_seq):
                self._resend(self._exchange.opened(expected_seq, 0.0))
            case NeedFullAnswer(seq):
                self.needed_full += 1
                self._resend(self._exchange.resend(FullPlanNeeded(seq)))
            case SequenceGapAnswer(expected_seq, received_seq):
                self._resend(self._exchange.resend(PlansMissing(expected_seq, received_seq)))
            case PlanResult(result):
                arrived = decode_result(encode_result(result))
                if self._exchange.take(arrived, 0.0) is None:
                    return
                if self._recorder is not None:
                    self._recorder.result_received(self._term.worker, arrived)
                self._results.append(arrived)
            case _:
                raise AssertionError(body)

    def _resend(self, messages: list[EncodedPlan]) -> None:
        self.resent += len(messages)
        self._to_worker.extend(messages)


class PipelinedCore(AroundExecutor):
    """The harness over one `WiredWorker`, w0."""

    def __init__(
        self,
        executor: StagingExecutor,
        settings: CoreSettings | None = None,
        *,
        recorder: PlanRecorder | None = None,
        draw: random.Random | None = None,
    ) -> None:
        """`draw`: when plans arrive and steps end; None: at once, and when they are waited for."""
        super().__init__(executor, settings)
        self._recorder = recorder
        self._draw = draw

    @property
    def wire(self) -> WiredWorker:
        return self.workers["w0"]

    def make_worker(self, info: WorkerInfo) -> WiredWorker:
        term = Term(worker="w0", epoch=1, term=self.terms["w0"], info=info)
        return WiredWorker(self._executor, term, self._recorder)

    def execute(self, name: str = "w0") -> ForwardResult:
        result = self.workers[name].next_result()
        plan = self.pending[name].popleft()
        assert plan.identity.seq == result.identity.seq
        return result

    def shake(self) -> None:
        """Let plans arrive or the device work, or break something, at random."""
        assert self._draw is not None
        chance = self._draw.random()
        if chance < 0.4:
            self.wire.arrive()
        elif chance < 0.7:
            self.wire.finish()
        elif chance < 0.72:
            self.wire.forget_bases()
        elif chance < 0.73:
            self.wire.break_stream()

    def _record_plan(self, worker: str, plan: ForwardPlan) -> None:
        super()._record_plan(worker, plan)
        self.plans.clear()
        self.wire.sent(plan)
