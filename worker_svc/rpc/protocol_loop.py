"""Carries out what the ordering protocol decides: device work, answers, ends. Lives in one event loop.

Knows neither gRPC messages of the callers nor torch. Guards: every action is carried out in the order it was given.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from protos.service.status import fault_border
from protos.wire.errors import DeviceFault, EngineError, InvalidPlan, UnsupportedFeature
from protos.wire.result import ForwardResult
from protos.wire.worker_info import WorkerInfo
from worker_svc.protocol.messages import (
    Action,
    AnswerAttach,
    ArrivedPlan,
    AttachCall,
    EndStream,
    Execute,
    PlanResult,
    RefuseAttach,
    Reply,
    ResetExecutor,
    Stopped,
    StreamOpening,
)
from worker_svc.protocol.worker_protocol import WorkerProtocol
from worker_svc.rpc.device_thread import DeviceJob, DeviceThread
from worker_svc.rpc.device_work import DeviceWork
from worker_svc.rpc.plan_intake import rejection_of
from worker_svc.rpc.plan_observer import PlanObserver
from worker_svc.rpc.plan_stream import PlanStream

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A plan that was given, or offered, to the device thread."""

    action: Execute
    job: DeviceJob[ForwardResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """What the loop works with, made at load."""

    info: WorkerInfo
    device: DeviceThread
    work: DeviceWork
    observer: PlanObserver


class ProtocolLoop:
    """One per loaded worker. Its methods are called in the event loop and return at once, `attach` and `stop` apart."""

    def __init__(self, parts: LoopParts) -> None:
        self._parts = parts
        self._protocol = WorkerProtocol(parts.info)
        self._keys = itertools.count(1)
        self._streams: dict[int, PlanStream] = {}
        self._attaches: dict[int, asyncio.Future[WorkerInfo]] = {}
        self._stopped = asyncio.Event()
        self._running: DevicePlan | None = None
        self._ahead: DevicePlan | None = None
        """Offered to the device thread, to begin when the one that runs ends; the protocol still has it waiting."""
        self.failure: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        """Set when the device can no longer be used; the process must end."""

    async def attach(self, asked: AttachCall) -> WorkerInfo:
        """Wait until the pair owns the worker.

        Raises:
            EngineError: why it does not.
        """
        call = next(self._keys)
        answer: asyncio.Future[WorkerInfo] = asyncio.get_running_loop().create_future()
        self._attaches[call] = answer
        self._recall()
        try:
            self._step(self._protocol.attach_requested, call, asked)
            return await answer
        finally:
            self._attaches.pop(call, None)

    def new_stream(self) -> PlanStream:
        """A call has begun."""
        stream = PlanStream(next(self._keys))
        self._streams[stream.key] = stream
        return stream

    def open_stream(self, stream: PlanStream, opening: StreamOpening) -> None:
        """Its first message."""
        if stream.key in self._streams:
            self._recall()
            self._step(self._protocol.stream_opened, stream.key, opening)

    def receive(self, stream: PlanStream, plan: ArrivedPlan) -> None:
        """A plan that could be read."""
        if stream.key in self._streams:
            self._step(self._protocol.plan_received, stream.key, plan)

    def receive_unreadable(self, stream: PlanStream, error: EngineError) -> None:
        """A message that could not be read."""
        if stream.key in self._streams:
            self._parts.observer.plan_unreadable()
            self._step(self._protocol.message_unreadable, stream.key, error)

    def requests_ended(self, stream: PlanStream) -> None:
        """The caller sends nothing more."""
        if stream.key in self._streams:
            self._step(self._protocol.requests_ended, stream.key)

    def close_stream(self, stream: PlanStream) -> None:
        """The call is over, however it ended."""
        self._streams.pop(stream.key, None)
        self._step(self._protocol.stream_closed, stream.key)

    def drain(self, reason: str) -> None:
        """Announce departure; plans still run."""
        self._step(self._protocol.drain_requested, reason)

    async def stop(self, reason: str) -> None:
        """Let the running plan finish, end the streams; nothing runs on the device afterwards."""
        self._recall()
        self._step(self._protocol.stop_requested, reason)
        await self._stopped.wait()

    # --- carrying out

    def _step(self, decide: Callable[..., list[Action]], *inputs: object) -> None:
        for action in decide(*inputs):
            self._carry_out(action)
        following = self._protocol.following
        if following is not None and self._ahead is None and self._running is not None:
            self._ahead = DevicePlan(following, self._parts.device.offer(partial(self._parts.work.execute, following)))

    def _carry_out(self, action: Action) -> None:
        match action:
            case Reply():
                self._reply(action)
            case Execute():
                self._execute(action)
            case EndStream():
                self._end_stream(action)
            case ResetExecutor():
                self._reset(action)
            case AnswerAttach():
                self._answer(action.call, action.info)
            case RefuseAttach():
                self._answer(action.call, action.error)
            case Stopped():
                self._stopped.set()

    def _reply(self, action: Reply) -> None:
        self._streams[action.stream].put(action.body)
        if isinstance(action.body, PlanResult) and action.body.result.rejection is not None:
            self._parts.observer.plan_rejected()

    def _execute(self, action: Execute) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            assert ahead.action.plan is action.plan, "the protocol gave another plan than the one it announced"
            self._parts.device.insist(ahead.job)
            running = ahead
        else:
            running = DevicePlan(action, self._parts.device.start(partial(self._parts.work.execute, action)))
        self._running = running
        running.job.future.add_done_callback(lambda _: self._plan_done(running))

    def _reset(self, action: ResetExecutor) -> None:
        _logger.info("attached by a new term", extra={"epoch": action.fence.epoch, "term": action.fence.term})
        self._parts.device.submit(partial(self._parts.work.reset, action.fence)).add_done_callback(self._reset_done)

    def _end_stream(self, action: EndStream) -> None:
        stream = self._streams.pop(action.stream, None)
        if stream is not None:
            stream.end(action.error)

    def _answer(self, call: int, answer: WorkerInfo | EngineError) -> None:
        future = self._attaches.pop(call, None)
        if future is None or future.done():
            return
        if isinstance(answer, EngineError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    # --- the device has answered

    def _recall(self) -> None:
        """Before waiting plans may be dropped: none of them has begun, as far as the protocol knows."""
        while (ahead := self._ahead) is not None:
            if self._parts.device.withdraw(ahead.job):
                self._ahead = None
                return
            # It has begun, so the plan before it has ended; the loop only has not been told yet.
            running = self._running
            assert running is not None
            running.job.settle()
            self._plan_done(running)

    def _plan_done(self, running: DevicePlan) -> None:
        if self._running is not running:
            return  # was told before, by `_recall`
        self._running = None
        action, done = running.action, running.job.future
        error = done.exception()
        if isinstance(error, InvalidPlan | UnsupportedFeature):
            rejected = ForwardResult(identity=action.plan.identity, rejection=rejection_of(error))
            self._device_step(self._protocol.plan_finished, rejected)
        elif error is not None:
            self._fail(error)
        else:
            result = done.result()
            self._device_step(self._protocol.plan_finished, result)
            self._parts.observer.plan_executed(action.plan, result)

    def _reset_done(self, done: "asyncio.Future[None]") -> None:
        error = done.exception()
        if error is not None:
            self._fail(error)
        else:
            self._device_step(self._protocol.executor_reset)

    def _device_step(self, decide: Callable[..., list[Action]], *inputs: object) -> None:
        try:
            with fault_border("device answer"):
                self._step(decide, *inputs)
        except EngineError as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """The device thread raises the taxonomy only; it is not asked for anything more."""
        assert isinstance(error, EngineError)
        # A bug's stack is in the log already; what the device said is only in the fault's cause.
        cause = error.__cause__ if isinstance(error, DeviceFault) else None
        extra = {"reason": error.reason, "error": error.message}
        _logger.error("the device cannot be used", extra=extra, exc_info=cause)
        self._parts.observer.device_failed()
        if not self.failure.done():
            self.failure.set_result(error)
            self._step(self._protocol.device_failed, error)
