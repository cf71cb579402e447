"""A scheduler's core process in virtual time: the real core and the real exchange of every link, messages between."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from protos.wire.errors import (
    ConnectionLost,
    DataFault,
    Draining,
    EngineError,
    NoServer,
    StaleEpoch,
    SyncError,
    UnavailableError,
    WrongIncarnation,
)
from protos.wire.limits import PROTOCOL_MAX, PROTOCOL_MIN
from protos.wire.plan import ForwardPlan
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.events import (
    Event,
    Instruction,
    NeedMask,
    ResultReceived,
    SendPlan,
    StreamAnswer,
    WorkerAttached,
    WorkerDoubted,
    WorkerLost,
    WorkerTrusted,
)
from scheduler_svc.core.scheduler import step, wake_at
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state import SchedulerState, check_invariants
from scheduler_svc.links.exchange import MAX_FRUITLESS_STREAMS, PlanExchange, is_death
from scheduler_svc.links.link_messages import EncodedPlan, FullPlanNeeded, LinkNack, PlansMissing, Report, Term
from scheduler_svc.links.liveness import Liveness, LivenessLimits
from tests.simulation.checker import Checker
from tests.simulation.virtual import Connection, Network, Process, VirtualTime
from tests.simulation.workers import SimWorker, StreamEnds
from tests.support.core_harness import mask_answer
from tests.support.stream_check import require
from worker_svc.protocol.messages import (
    AttachCall,
    DrainAnswer,
    NeedFullAnswer,
    OpenedAnswer,
    PlanResult,
    ReplyBody,
    SequenceGapAnswer,
    StaleAnswer,
    StreamOpening,
)

LIMITS = LivenessLimits(report_late_s=1.0, report_lost_s=2.75, plan_timeout_s=10.0)
REOPEN_S = 2.0
LATE_COPY_S = 0.02
"""Results of plans that were sent after the first copy are few enough to leave that plan's result in the cache."""
MASK_S = 0.004
"""What a grammar's answer takes."""
_LEGAL_ENDS = (ConnectionLost, DataFault, Draining, NoServer, StaleEpoch, UnavailableError, WrongIncarnation)
"""Why a term may end. Anything else is a bug of the protocol or of the link."""


class World(Protocol):
    """What schedulers need of the run."""

    network: Network
    checker: Checker

    @property
    def workers(self) -> Mapping[str, SimWorker]: ...

    @property
    def loses_messages(self) -> bool:
        """Within streams, which no network does: then a plan that is missing twice ends the term."""
        ...

    @property
    def may_stand_still(self) -> bool:
        """Whether anything happened for which a living worker may be given up."""
        ...

    def message_fate(self, worker: str) -> str:
        """good, lost, twice or torn."""
        ...

    def answered(self, scheduler: "SimScheduler", answer: StreamAnswer) -> None: ...


class SimScheduler(Process):
    """One life of one scheduler."""

    def __init__(self, time: VirtualTime, world: World, *, epoch: int, settings: CoreSettings) -> None:
        super().__init__(time, f"s{epoch}")
        self.epoch = epoch
        self.world = world
        self.state = SchedulerState.create(settings)
        self.links = {name: SimLink(self, name) for name in world.workers}
        self._events: list[Event] = []
        self._turn_due: float | None = None
        for link in self.links.values():
            link.attach()

    def post(self, *events: Event) -> None:
        self._events.extend(events)
        self._turn_by(self.time.now + 0.0005)

    def fence(self) -> None:
        """Another scheduler has a worker: the process ends."""
        self.world.checker.counts["fenced"] += 1
        self.kill()

    def kill(self) -> None:
        """Its calls end with it."""
        self.is_alive = False
        for link in self.links.values():
            link.hang_up()

    def _turn_by(self, at: float) -> None:
        if self._turn_due is None or at < self._turn_due:
            self._turn_due = at
            self.after(max(0.0, at - self.time.now), lambda: self._turn(at))

    def _turn(self, at: float) -> None:
        if self._turn_due != at:
            return
        self._turn_due = None
        events, self._events = self._events, []
        out = step(self.state, events, self.time.now)
        check_invariants(self.state)
        for instruction in out:
            self._carry_out(instruction)
        wake = wake_at(self.state)
        if wake is not None:
            self._turn_by(wake)

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, SendPlan):
            self._send(instruction.worker, instruction.plan)
        elif isinstance(instruction, NeedMask):
            self.after(MASK_S, lambda: self.post(mask_answer(instruction)))
        elif isinstance(instruction, StreamAnswer):
            self.world.answered(self, instruction)

    def _send(self, worker: str, plan: ForwardPlan) -> None:
        live = {request.handle: request.spec for request in self.state.streams.values()}
        checker = self.world.checker
        checker.planned(worker, plan, live)
        for handle in plan.rows.handles.tolist():
            checker.stream_of[self.epoch, handle] = live[handle].stream.stream_id
        self.links[worker].send(plan)
        state = self.state.workers[worker]
        checker.apart(plan, set(state.standing.struck), in_flight=len(state.in_flight))


class TermWitness:
    """What a term went through, counted apart from the code that decides by it."""

    def __init__(self) -> None:
        self.rows_out: dict[int, list[int]] = {}
        """Handles, by seq of the plans without a result."""
        self._broken_since: float | None = None
        self._breaks = 0
        """Since the last result that counted."""

    @property
    def alone(self) -> int | None:
        """The only request that has rows out; None if several have, or none."""
        handles = {handle for handles in self.rows_out.values() for handle in handles}
        return handles.pop() if len(handles) == 1 else None

    def answered(self, seq: int) -> None:
        self._breaks = 0
        self.rows_out.pop(seq, None)

    def opened(self) -> None:
        self._broken_since = None

    def broke(self, over: EngineError | None, now: float) -> None:
        """A stream that the network broke is opened again for REOPEN_S and no more often than allowed; `over`: not."""
        if self._broken_since is None:
            self._broken_since = now
            self._breaks += 1
        since, breaks = self._broken_since, self._breaks
        is_enough = breaks > MAX_FRUITLESS_STREAMS or now >= since + REOPEN_S
        if isinstance(over, ConnectionLost | DataFault):
            require(is_enough, "I2 given up though it may be reached", since=since, now=now, breaks=breaks)
        require(over or not is_enough, "I15 streams without end", since=since, now=now, breaks=breaks)


class SimLink:
    """`WorkerLink` and `WorkerSession` without sockets: the same decisions, taken by the same `PlanExchange`."""

    def __init__(self, scheduler: SimScheduler, worker: str) -> None:
        self.worker = worker
        self.is_doubted = False
        self.exchange: PlanExchange | None = None
        """Of the term, from its attach to its end."""
        self._scheduler = scheduler
        self._world = scheduler.world
        self._term = 0
        self._try = 0
        """Raised at each call: whatever belongs to an older one is ignored."""
        self._connection: Connection | None = None
        self._write: Callable[[EncodedPlan], None] | None = None
        """Set while the stream is open."""
        self._was_opened = False
        self._is_leaving = False
        self._witness = TermWitness()

    @property
    def is_serving(self) -> bool:
        return self._write is not None

    # --- attach

    def attach(self) -> None:
        self._term += 1
        number = self._next_try()
        scheduler, process = self._scheduler, self._world.workers[self.worker]
        asked = AttachCall(
            epoch=scheduler.epoch,
            term=self._term,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            scheduler_name=scheduler.name,
        )
        scheduler.after(2.0, lambda: self._attach_failed(number))
        if not process.is_alive:
            scheduler.after(0.001, lambda: self._attach_failed(number))
            return
        call = Connection(self._world.network, scheduler, process, on_break=(lambda: None, lambda: None))
        self._connection = call

        def answer(info: WorkerInfo | EngineError) -> None:
            call.to_client(lambda: self._attach_answered(number, info))

        call.to_server(lambda: process.attach(asked, answer))

    def _attach_failed(self, number: int) -> None:
        if number == self._try:
            self._next_try()
            self._scheduler.after(0.1, self.attach)

    def _attach_answered(self, number: int, answer: WorkerInfo | EngineError) -> None:
        if number != self._try:
            return
        if isinstance(answer, StaleEpoch) and answer.highest_epoch > self._scheduler.epoch:
            self._scheduler.fence()
        elif isinstance(answer, EngineError):
            self._attach_failed(number)
        else:
            now = self._scheduler.time.now
            term = Term(worker=self.worker, epoch=self._scheduler.epoch, term=self._term, info=answer)
            self.exchange = PlanExchange(term, liveness=Liveness(LIMITS, now=now), min_delta_bytes=0, reopen_s=REOPEN_S)
            self._was_opened = self._is_leaving = self.is_doubted = False
            self._witness = TermWitness()
            self._watch(self.exchange)
            self._open()

    # --- streams

    def _open(self) -> None:
        exchange, process, scheduler = self.exchange, self._world.workers[self.worker], self._scheduler
        if exchange is None:
            return
        opening, number = exchange.next_opening(), self._next_try()
        if not process.is_alive:
            scheduler.after(0.001, lambda: self._broken(number, NoServer("nobody listens")))
            return
        lost = ConnectionLost("the connection was lost")
        key = 0
        stream = Connection(
            self._world.network,
            scheduler,
            process,
            on_break=(lambda: self._broken(number, lost), lambda: process.close_stream(key)),
        )
        ends = StreamEnds(
            reply=lambda body: stream.to_client(lambda: self._replied(number, body)),
            end=lambda error: stream.to_client(lambda: self._broken(number, error or lost)),
        )
        key = process.new_stream(ends)
        process.on_death.append(stream.break_off)
        self._connection = stream
        term = opening.term
        message = StreamOpening(
            epoch=term.epoch, term=term.term, incarnation=term.info.incarnation, stream_number=opening.stream_number
        )
        stream.to_server(lambda: process.open_stream(key, message))
        scheduler.after(1.0, lambda: self._open_late(number))
        self._channel = (stream, process, key)

    def _open_late(self, number: int) -> None:
        if number == self._try and self._write is None:
            self._broken(number, ConnectionLost("the stream did not open in time"))

    def _opened(self, expected_seq: int) -> None:
        exchange = self.exchange
        assert exchange is not None
        messages = exchange.opened(expected_seq, self._scheduler.time.now)
        stream, process, key = self._channel
        self._write = lambda message: stream.to_server(lambda: process.receive(key, message))
        self._witness.opened()
        if not self._was_opened:
            self._was_opened = True
            term = exchange.term
            self._scheduler.post(WorkerAttached(term.worker, term.info, term.epoch, term.term))
        else:
            self._world.checker.counts["reopened"] += 1
        for message in messages:
            self._world.checker.counts["resent"] += 1
            self._transmit(message)
        self._look()

    def _broken(self, number: int, error: EngineError) -> None:
        if number != self._try or self.exchange is None:
            return
        self._leave_stream()
        if not self._was_opened:
            self._end_term(error)
            return
        now = self._scheduler.time.now
        over = self.exchange.broke(error, now)
        self._witness.broke(over, now)
        if over is not None:
            self._end_term(over)
            return
        self._look()
        exchange = self.exchange
        self._scheduler.after(0.05, lambda: self._open() if self.exchange is exchange else None)

    def _leave_stream(self) -> None:
        self._next_try()
        self._write = None
        if self._connection is not None:
            self._connection.end()
            self._connection = None

    def _end_term(self, reason: EngineError) -> None:
        is_legal = isinstance(reason, _LEGAL_ENDS) or (type(reason) is SyncError and self._world.loses_messages)
        require(is_legal, "a term ended for no legal reason", reason=reason.reason, why=str(reason))
        self._world.checker.counts[f"ended {reason.reason}"] += 1
        self._leave_stream()
        self.exchange = None
        if self._was_opened:
            died = is_death(reason)
            if died:
                self._note_who_was_alone()
            self._scheduler.post(WorkerLost(self.worker, died=died))
        if isinstance(reason, StaleEpoch) and reason.highest_epoch > self._scheduler.epoch:
            self._scheduler.fence()
            return
        self._scheduler.after(0.1, self.attach)

    def _note_who_was_alone(self) -> None:
        handle = self._witness.alone
        if handle is not None:
            self._world.checker.died_alone_with(self._scheduler.epoch, handle)

    def hang_up(self) -> None:
        """The process is gone."""
        if self._connection is not None:
            self._connection.end()

    def break_stream(self) -> None:
        """The network ends the stream."""
        if self._connection is not None:
            self._connection.break_off()

    # --- plans and answers

    def send(self, plan: ForwardPlan) -> None:
        self._witness.rows_out[plan.identity.seq] = plan.rows.handles.tolist()
        if self.exchange is None:
            self._note_who_was_alone()
            return  # the core is being told that the worker is lost
        message = self.exchange.send(plan, self._scheduler.time.now)
        self._transmit(message)

    def _transmit(self, message: EncodedPlan) -> None:
        if self._write is None:
            return
        fate = self._world.message_fate(self.worker)
        if fate == "torn":
            self._write(replace(message, crc32=message.crc32 ^ 1))
            return
        if fate == "lost":
            return
        write = self._write
        write(message)
        if fate == "twice":
            late_s = self._world.network.random.uniform(0.0, LATE_COPY_S)
            self._scheduler.after(late_s, lambda: write(message))

    def _replied(self, number: int, body: ReplyBody) -> None:
        if number != self._try or self.exchange is None:
            return
        try:
            self._take(body)
        except EngineError as error:
            self._broken(number, error)

    def _take(self, body: ReplyBody) -> None:
        exchange = self.exchange
        assert exchange is not None
        match body:
            case OpenedAnswer(expected_seq):
                self._opened(expected_seq)
            case PlanResult(result):
                if self._world.message_fate(self.worker) == "torn":
                    raise DataFault("the checksum is wrong")
                answered = exchange.take(result, self._scheduler.time.now)
                if answered is None:
                    self._world.checker.counts["late results"] += 1
                else:
                    require(result.rejection is None, "a valid plan was refused", rejection=result.rejection)
                    self._witness.answered(result.identity.seq)
                    self._scheduler.post(ResultReceived(self.worker, result))
            case DrainAnswer():
                self._is_leaving = True
                self._look()
            case NeedFullAnswer(seq):
                self._again("need full", exchange.resend(FullPlanNeeded(seq)))
            case SequenceGapAnswer(expected_seq, received_seq):
                self._again("gap", exchange.resend(PlansMissing(expected_seq, received_seq)))
            case StaleAnswer():
                exchange.resend(LinkNack("stale"))

    def _again(self, kind: str, messages: list[EncodedPlan]) -> None:
        self._world.checker.counts[kind] += 1
        for message in messages:
            self._transmit(message)

    # --- health

    def reported(self, report: Report) -> None:
        if self.exchange is None or not self._was_opened:
            return
        try:
            self.exchange.reported(report, self._scheduler.time.now)
        except WrongIncarnation as error:
            self._end_term(error)
        else:
            self._look()

    def _look(self) -> None:
        if self.exchange is None or not self._was_opened:
            return
        doubted = self._is_leaving or self.exchange.is_suspect(self._scheduler.time.now)
        if doubted is not self.is_doubted:
            self.is_doubted = doubted
            self._world.checker.counts["doubted"] += doubted
            self._scheduler.post(WorkerDoubted(self.worker) if doubted else WorkerTrusted(self.worker))

    def _watch(self, exchange: PlanExchange) -> None:
        now = self._scheduler.time.now
        due = exchange.liveness.next_check(now)
        self._scheduler.after(max(0.001, due - now), lambda: self._check(exchange, due))

    def _check(self, exchange: PlanExchange, due: float) -> None:
        now = self._scheduler.time.now
        if self.exchange is not exchange:
            return
        if now - due > 0.25:
            exchange.liveness.forgive(now)
        verdict = exchange.liveness.verdict(now)
        if verdict is not None:
            is_shot = self._world.workers[self.worker].is_alive and not self._world.may_stand_still
            require(not is_shot, "I2 a healthy worker is given up", worker=self.worker, why=verdict.message)
            self._end_term(verdict)
            return
        self._look()
        self._watch(exchange)

    def _next_try(self) -> int:
        self._try += 1
        return self._try
