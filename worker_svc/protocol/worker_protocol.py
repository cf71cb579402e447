"""The worker's ordering protocol: attach, order, idempotence, fencing. Inputs in, actions out.

No I/O, clock, threads or randomness: the shell (`worker_svc/rpc/protocol_loop.py`) carries the actions out, the
simulator runs the same code. Guards I8-I11; DESIGN 5 is its specification.
"""

from enum import Enum, auto

from protos.wire.errors import Draining, EngineError, InvalidRequest, SyncError, WindowFull, WrongIncarnation
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult, PlanRejection
from protos.wire.worker_info import WorkerInfo
from worker_svc.protocol.attachment import Attachment
from worker_svc.protocol.messages import (
    Action,
    ArrivedPlan,
    AttachCall,
    DrainAnswer,
    EndStream,
    Execute,
    Fence,
    MissingBase,
    NeedFullAnswer,
    OpenedAnswer,
    PlanResult,
    RefuseAttach,
    Reply,
    ReplyBody,
    ResetExecutor,
    SequenceGapAnswer,
    StaleAnswer,
    Stopped,
    StreamOpening,
)
from worker_svc.protocol.plan_order import Arrival, PlanOrder


class DeviceUse(Enum):
    """What the device was last told to do."""

    IDLE = auto()
    EXECUTING = auto()
    """A plan of the highest pair."""
    OUTDATED = auto()
    """A plan of an older pair: its result goes nowhere, then the executor is reset."""
    RESETTING = auto()


class WorkerProtocol:
    """One per process. Every method returns the actions to carry out, in order."""

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info
        self._attachment = Attachment(info)
        self._order = self._new_order()
        self._device = DeviceUse.IDLE
        self._resetting: Fence | None = None
        """The pair that the executor is, or was last, reset for; a higher one may have come meanwhile."""
        self._stream: int | None = None
        self._stream_number = 0
        self._has_all_requests = False
        self._closing: EngineError | None = None
        """Set: no attach is accepted any more, and why."""
        self._is_stopping = False

    # --- attach

    def attach_requested(self, call: int, asked: AttachCall) -> list[Action]:
        """A scheduler wants the worker under a new pair, or repeats that."""
        if self._attachment.is_retry(asked) and not self._is_stopping:
            return self._attachment.join(call)
        refusal = self._attachment.refusal(asked) or self._closing
        if refusal is not None:
            return [RefuseAttach(call, refusal)]
        actions = self._attachment.begin(call, asked)
        actions += self._end_stream(self._attachment.stale(asked.fence))
        self._order = self._new_order()
        self._stream_number = 0
        if self._device is DeviceUse.EXECUTING:
            self._device = DeviceUse.OUTDATED
        return actions + self._reset_when_idle()

    def executor_reset(self) -> list[Action]:
        """The device forgot the older pairs; nothing of the highest one has run."""
        assert self._device is DeviceUse.RESETTING
        self._device = DeviceUse.IDLE
        if self._is_stopping:
            return [Stopped()]
        if self._resetting != self._attachment.highest:
            return self._reset_when_idle()
        return self._attachment.complete()

    # --- the plan stream

    def stream_opened(self, stream: int, opening: StreamOpening) -> list[Action]:
        """First message of a call. A higher stream number ends the older call and expects what has not started."""
        refusal = self._opening_refusal(stream, opening)
        if refusal is not None:
            return self._refuse_stream(stream, refusal)
        actions = self._end_stream(SyncError("superseded by a higher stream_number", field="stream_number"))
        self._stream = stream
        self._stream_number = opening.stream_number
        self._has_all_requests = False
        self._order.reopen()
        actions.append(Reply(stream, OpenedAnswer(self._order.expected_seq)))
        if self._closing is not None:
            actions.append(Reply(stream, DrainAnswer(self._closing.message)))
        return actions

    def plan_received(self, stream: int, plan: ArrivedPlan) -> list[Action]:
        """A plan whose checksum and envelope were read."""
        if stream != self._stream:
            return [EndStream(stream, InvalidRequest("the first message of a stream opens it", field="open"))]
        if self._is_stopping:
            return []
        fault = self._identity_fault(plan.fence, plan.identity.incarnation)
        if fault is not None:
            return self._end_stream(fault)
        return self._place(plan)

    def message_unreadable(self, stream: int, error: EngineError) -> list[Action]:
        """A message that could not be read: no seq is consumed, the scheduler reopens and sends again."""
        return self._refuse_stream(stream, error)

    def requests_ended(self, stream: int) -> list[Action]:
        """The caller sends nothing more; the call ends behind its last result."""
        if stream != self._stream:
            return [EndStream(stream)]
        self._has_all_requests = True
        return self._end_if_answered()

    def stream_closed(self, stream: int) -> list[Action]:
        """The call is gone. What it sent goes on; results are kept for the next stream."""
        if stream == self._stream:
            self._stream = None
        return []

    # --- the device

    def plan_finished(self, result: ForwardResult) -> list[Action]:
        """The one plan that was out is done."""
        if self._device is DeviceUse.OUTDATED:
            self._device = DeviceUse.IDLE
            return self._reset_when_idle()
        assert self._device is DeviceUse.EXECUTING
        self._device = DeviceUse.IDLE
        actions = self._deliver(result)
        if self._is_stopping:
            return [*actions, *self._end_stream(self._closing), Stopped()]
        return actions + self._advance() + self._end_if_answered()

    def device_failed(self, error: EngineError) -> list[Action]:
        """The device is unusable: everyone who waits hears it, nothing else will be accepted."""
        self._closing = error
        self._is_stopping = True
        return [*self._attachment.refuse_waiting(error), *self._end_stream(error), Stopped()]

    @property
    def following(self) -> Execute | None:
        """What `plan_finished` will give to execute, unless something else happens first; None: nothing."""
        plan = self._order.waiting
        if self._device is not DeviceUse.EXECUTING or self._is_stopping or plan is None:
            return None
        content = plan.content
        return Execute(content, plan.times, plan.run) if isinstance(content, ForwardPlan) else None

    # --- leaving

    def drain_requested(self, reason: str) -> list[Action]:
        """Announce departure and accept no attach; plans still run, so that the scheduler can move its requests."""
        if self._closing is not None:
            return []
        self._closing = Draining(reason)
        return self._reply(DrainAnswer(reason))

    def stop_requested(self, reason: str) -> list[Action]:
        """Finish the plan that runs, drop the ones that have not started, end the stream."""
        if self._is_stopping:
            return []
        actions = self.drain_requested(reason)
        self._is_stopping = True
        closing = self._closing
        assert closing is not None
        self._order.drop_waiting()
        actions += self._attachment.refuse_waiting(closing)
        if self._device is DeviceUse.IDLE:
            return [*actions, *self._end_stream(closing), Stopped()]
        return actions

    # --- helpers

    def _new_order(self) -> PlanOrder:
        return PlanOrder(window=self._info.limits.window, cached_results=self._info.limits.cached_results)

    def _opening_refusal(self, stream: int, opening: StreamOpening) -> EngineError | None:
        if self._is_stopping:
            return self._closing
        if stream == self._stream:
            return InvalidRequest("the stream is open already", field="open")
        fault = self._identity_fault(opening.fence, opening.incarnation)
        if fault is not None:
            return fault
        if opening.stream_number <= self._stream_number:
            return SyncError(
                f"stream_number {opening.stream_number} is not above {self._stream_number}", field="stream_number"
            )
        return None

    def _identity_fault(self, fence: Fence, incarnation: bytes) -> EngineError | None:
        if incarnation != self._info.incarnation:
            return WrongIncarnation("incarnation: this worker was started anew and its pages are empty")
        if fence < self._attachment.highest:
            return self._attachment.stale(fence)
        if fence > self._attachment.highest or not self._attachment.is_complete:
            return InvalidRequest(f"epoch {fence.epoch} term {fence.term} has not attached", field="epoch")
        return None

    def _place(self, plan: ArrivedPlan) -> list[Action]:
        seq = plan.identity.seq
        arrival = self._order.arrive(plan)
        if arrival is Arrival.ACCEPTED:
            return self._advance()
        if arrival is Arrival.OVERRUN:
            return self._end_stream(WindowFull(f"plan {seq} goes far beyond the window of plans in flight"))
        if arrival is Arrival.FINISHED:
            return self._reply(PlanResult(self._order.result(seq)))
        if arrival is Arrival.FORGOTTEN:
            return self._reply(StaleAnswer(seq, self._order.expected_seq))
        if arrival is Arrival.NEEDS_FULL:
            return self._reply(NeedFullAnswer(seq))
        if arrival is Arrival.EARLY:
            return self._reply(SequenceGapAnswer(self._order.expected_seq, seq))
        return []

    def _advance(self) -> list[Action]:
        actions: list[Action] = []
        while self._device is DeviceUse.IDLE and (plan := self._order.take()) is not None:
            if isinstance(plan.content, PlanRejection):
                actions += self._deliver(ForwardResult(identity=plan.identity, rejection=plan.content))
            else:
                assert not isinstance(plan.content, MissingBase), "never accepted"
                self._device = DeviceUse.EXECUTING
                actions.append(Execute(plan.content, plan.times, plan.run))
        return actions

    def _deliver(self, result: ForwardResult) -> list[Action]:
        is_awaited = self._order.finish(result)
        return self._reply(PlanResult(result)) if is_awaited else []

    def _reply(self, body: ReplyBody) -> list[Action]:
        return [] if self._stream is None else [Reply(self._stream, body)]

    def _reset_when_idle(self) -> list[Action]:
        if self._device is not DeviceUse.IDLE:
            return []
        if self._is_stopping:
            return [Stopped()]
        self._device = DeviceUse.RESETTING
        self._resetting = self._attachment.highest
        return [ResetExecutor(self._resetting)]

    def _refuse_stream(self, stream: int, error: EngineError) -> list[Action]:
        return self._end_stream(error) if stream == self._stream else [EndStream(stream, error)]

    def _end_stream(self, error: EngineError | None) -> list[Action]:
        stream, self._stream = self._stream, None
        return [] if stream is None else [EndStream(stream, error)]

    def _end_if_answered(self) -> list[Action]:
        if self._has_all_requests and not self._order.has_unanswered:
            return self._end_stream(None)
        return []
