"""A worker process in virtual time: the real protocol core and intake, an exact fake executor below."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from protos.forwardplane.v1.worker_pb2 import PlanMessage
from protos.wire.enums import RowFailure, WorkerState
from protos.wire.errors import EngineError
from protos.wire.limits import PROTOCOL_MAX
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult, PlanTimings
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.links.link_messages import EncodedPlan, Report
from tests.simulation.checker import Checker
from tests.simulation.virtual import Process, VirtualTime
from tests.support.fake_worker import FakeWorker
from worker_svc.protocol.messages import (
    Action,
    AnswerAttach,
    AttachCall,
    EndStream,
    Execute,
    RefuseAttach,
    Reply,
    ReplyBody,
    ResetExecutor,
    Stopped,
    StreamOpening,
)
from worker_svc.protocol.worker_protocol import WorkerProtocol
from worker_svc.rpc.plan_intake import PlanIntake

Answer = Callable[[WorkerInfo | EngineError], None]


@dataclass(kw_only=True)
class DeviceHabits:
    """How the device behaves; changed by faults, restored when they stop."""

    step_s: tuple[float, float] = (0.02, 0.06)
    is_sick: bool = False
    """Its numbers are bad."""
    hangs: Callable[[], None] | None = None
    """Set: the next plan never ends; called when it begins."""
    watchdog_s: float = 2.5
    """After which the process of a plan that never ends is ended."""
    dies_at: Callable[[ForwardPlan], bool] = field(default=lambda plan: False)


@dataclass(kw_only=True)
class StreamEnds:
    """How a worker answers on one stream."""

    reply: Callable[[ReplyBody], None]
    end: Callable[[EngineError | None], None]


class SimWorker(Process):
    """One life of one worker: a new incarnation is a new object."""

    def __init__(
        self,
        time: VirtualTime,
        info: WorkerInfo,
        *,
        name: str,
        source: random.Random,
        checker: Checker,
        habits: DeviceHabits,
    ) -> None:
        super().__init__(time, name)
        self.info = info
        self.habits = habits
        self.counter = 0
        self.pair = (0, 0)
        self.started_seq = self.finished_seq = 0
        self.is_draining = False
        self.on_death: list[Callable[[], None]] = []
        self._random = source
        self._checker = checker
        self._executor = FakeWorker(info, fail_row=self._row_failure)
        self._protocol = WorkerProtocol(info)
        self._intake = PlanIntake(info, lambda: 0, lambda plan, _: lambda: self._executor.execute(plan))
        self._attaches: dict[int, Answer] = {}
        self._streams: dict[int, StreamEnds] = {}
        self._next_key = 1

    def report(self) -> Report:
        return Report(
            incarnation=self.info.incarnation,
            state=WorkerState.DRAINING if self.is_draining else WorkerState.SERVING,
            device_counter=self.counter,
            capture_budget_s=0.0,
            pair=self.pair,
            started_seq=self.started_seq,
            finished_seq=self.finished_seq,
        )

    # --- from the network

    def attach(self, asked: AttachCall, answer: Answer) -> None:
        key = self._key()
        self._attaches[key] = answer
        self._checker.attach_asked(self, asked)
        self._carry_out(self._protocol.attach_requested(key, asked))

    def new_stream(self, ends: StreamEnds) -> int:
        key = self._key()
        self._streams[key] = ends
        return key

    def open_stream(self, key: int, opening: StreamOpening) -> None:
        if key in self._streams:
            self._carry_out(self._protocol.stream_opened(key, opening))

    def receive(self, key: int, message: EncodedPlan) -> None:
        if key not in self._streams:
            return
        try:
            plan = self._intake.read(PlanMessage(body=message.body, crc32=message.crc32))
        except EngineError as error:
            self._carry_out(self._protocol.message_unreadable(key, error))
        else:
            self._carry_out(self._protocol.plan_received(key, plan))

    def close_stream(self, key: int) -> None:
        self._streams.pop(key, None)
        self._carry_out(self._protocol.stream_closed(key))

    def meet_stranger(self) -> None:
        """A scheduler of a later protocol asks, whose epoch is above all others."""
        later = PROTOCOL_MAX + 1
        asked = AttachCall(epoch=1 << 40, term=1, protocol_min=later, protocol_max=later, scheduler_name="stranger")
        self.attach(asked, self._checker.attach_refused)

    # --- life

    def drain(self) -> None:
        self.is_draining = True
        self._carry_out(self._protocol.drain_requested("leaving"))

    def stop(self) -> None:
        self._carry_out(self._protocol.stop_requested("leaving"))

    def die(self) -> None:
        if self.is_alive:
            self.is_alive = False
            for tell in self.on_death:
                tell()

    # --- carrying out

    def _key(self) -> int:
        self._next_key += 1
        return self._next_key

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Reply(stream, body):
                    self._streams[stream].reply(body)
                case EndStream(stream, error):
                    ends = self._streams.pop(stream, None)
                    if ends is not None:
                        ends.end(error)
                case AnswerAttach(call, info):
                    self._answer(call, info)
                case RefuseAttach(call, refusal):
                    self._answer(call, refusal)
                case Execute():
                    self._execute(action)
                case ResetExecutor(fence):
                    self._checker.reset(self, fence)
                    self.after(self._random.uniform(0.0, self._random.choice([0.02, 0.02, 0.5])), self._reset)
                case Stopped():
                    self.after(0.0, self.die)

    def _answer(self, call: int, answer: WorkerInfo | EngineError) -> None:
        waiting = self._attaches.pop(call, None)
        if waiting is not None:
            waiting(answer)

    def _execute(self, action: Execute) -> None:
        self._checker.executed(self, action.plan)
        identity = action.plan.identity
        if self.pair != (identity.epoch, identity.term):
            self.pair, self.finished_seq = (identity.epoch, identity.term), 0
        self.started_seq = identity.seq
        if self.habits.dies_at(action.plan):
            self.after(0.001, self.die)
            return
        seconds = self._random.uniform(*self.habits.step_s)
        if self.habits.hangs is not None:
            tell, self.habits.hangs = self.habits.hangs, None
            tell()
            # The watchdog ends the process without the interpreter's help.
            self.after(self.habits.watchdog_s, self.die)
            return
        self.after(seconds, lambda: self._finish(action, seconds))

    def _finish(self, action: Execute, seconds: float) -> None:
        assert action.run is not None
        result: ForwardResult = action.run()
        self.counter += 1
        self.finished_seq = action.plan.identity.seq
        result = replace(result, timings=PlanTimings(forward_ns=int(seconds * 1e9)))
        self._carry_out(self._protocol.plan_finished(result))

    def _reset(self) -> None:
        self._executor.reset()
        self.counter += 1
        self._carry_out(self._protocol.executor_reset())

    def _row_failure(self, plan: ForwardPlan, row: int) -> RowFailure | None:
        if not self.habits.is_sick:
            return None
        self._checker.bad_row(plan, row)
        return RowFailure.NAN
