"""One term of one worker: which plans are out, what to send again, which result counts, and when the term is over.

Pure: times are arguments, messages are values. The session (`links/session.py`) carries out what this decides; the
simulator runs the same code. Guards: results leave in seq order, each once; a plan is only sent again under its own
seq; a stream is opened again only under a higher number of the same term.
"""

from dataclasses import dataclass

from protos.wire.errors import (
    ConnectionLost,
    DataFault,
    DeviceFault,
    Draining,
    EngineError,
    SyncError,
    UnavailableError,
    WrongIncarnation,
)
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from scheduler_svc.links.link_messages import EncodedPlan, FullPlanNeeded, LinkNack, PlansMissing, Report, Term
from scheduler_svc.links.liveness import Liveness
from scheduler_svc.links.statistics import InFlight
from scheduler_svc.links.unanswered import UnansweredPlans

MAX_FRUITLESS_STREAMS = 3
"""Streams in a row that broke without a result before the term is given up."""

Nack = FullPlanNeeded | PlansMissing | LinkNack


@dataclass(frozen=True, slots=True)
class Answered:
    """A result that counts."""

    result: ForwardResult
    rtt_s: float


@dataclass(frozen=True, slots=True)
class StreamOpen:
    """How to open the next stream of the term."""

    term: Term
    stream_number: int


class PlanExchange:
    """Made after an attach, discarded with the term."""

    def __init__(self, term: Term, *, liveness: Liveness, min_delta_bytes: int, reopen_s: float) -> None:
        self.term = term
        self.liveness = liveness
        self.in_flight = InFlight()
        self._unanswered = UnansweredPlans(term.info, min_delta_bytes=min_delta_bytes)
        self._reopen_s = reopen_s
        self._reopen_until: float | None = None
        self._stream_number = 0
        self._fruitless = 0

    def send(self, plan: ForwardPlan, now: float) -> EncodedPlan:
        """The plan as it is to be sent, if the stream is open; a later stream sends it by itself."""
        message = self._unanswered.add(plan)
        self.in_flight.add(message.seq, now)
        self.liveness.plan_sent(message.seq, budget_s=plan.identity.budget_ms / 1000, now=now)
        return message

    # --- streams

    def next_opening(self) -> StreamOpen:
        """For the next `Execute` call, each under a number of its own."""
        self._stream_number += 1
        return StreamOpen(self.term, self._stream_number)

    def opened(self, expected_seq: int, now: float) -> list[EncodedPlan]:
        """The worker took the stream and expects that plan: what to send before anything else.

        Raises:
            SyncError: it lost or invented plans.
        """
        due = self.in_flight.oldest()
        first, behind = due or self._next_seq(), self._next_seq()
        if not first <= expected_seq <= behind:
            message = f"the worker expects plan {expected_seq}, not one of {first}..{behind}"
            raise SyncError(message, field="expected_seq")
        if self._reopen_until is not None:
            self._reopen_until = None
            self.liveness.stream_reopened(now, is_new_to_worker=expected_seq == first)
        return self._unanswered.all_again()

    def broke(self, error: EngineError, now: float) -> EngineError | None:
        """The stream ended, or could not be opened: None to open the next one, or why the term is over."""
        if not may_reopen(error):
            return error
        self.liveness.stream_broke()
        if self._reopen_until is None:
            self._reopen_until = now + self._reopen_s
            self._fruitless += 1
        if self._fruitless > MAX_FRUITLESS_STREAMS or now >= self._reopen_until:
            return error
        return None

    # --- answers

    def take(self, result: ForwardResult, now: float) -> Answered | None:
        """The result of the plan that is due; None for one that counts no more.

        Raises:
            SyncError: a plan before it has no result.
        """
        seq, due = result.identity.seq, self.in_flight.oldest()
        if due is None or seq < due or not self._is_current(result):
            return None
        if seq != due:
            message = f"the worker answered plan {seq} when plan {due} was due"
            raise SyncError(message, field="seq", plan_seq=seq)
        rtt_s = self.in_flight.pop(seq, now)
        self._unanswered.answered(seq, was_refused=result.rejection is not None)
        self.liveness.plan_answered(seq, now=now)
        self._fruitless = 0
        return Answered(result, rtt_s)

    def resend(self, nack: Nack) -> list[EncodedPlan]:
        """What to send now that the worker did not take a plan.

        Raises:
            SyncError: sending again cannot help.
        """
        match nack:
            case FullPlanNeeded(seq):
                return self._unanswered.in_full(seq)
            case PlansMissing(expected_seq, _):
                return self._unanswered.again(expected_seq)
            case LinkNack(kind):
                raise SyncError(f"the worker answered {kind} instead of a result")

    def reported(self, report: Report, now: float) -> None:
        """A report arrived.

        Raises:
            WrongIncarnation: it is of another process.
        """
        if report.incarnation != self.term.info.incarnation:
            raise WrongIncarnation("the worker was restarted", field="incarnation")
        self.liveness.reported(
            counter=report.device_counter,
            device_seq=device_seq(report, (self.term.epoch, self.term.term)),
            capture_budget_s=report.capture_budget_s,
            now=now,
        )

    # --- the worker's health

    def forgive(self, now: float, *, stalled_s: float) -> None:
        """This process stood still for so long: no time of the worker's, nor of a stream's to be opened again."""
        self.liveness.forgive(now)
        if self._reopen_until is not None:
            self._reopen_until += stalled_s

    def is_suspect(self, now: float) -> bool:
        """Whether the worker should get no new requests: its stream is broken, or it is late."""
        return self._reopen_until is not None or self.liveness.is_doubtful(now)

    def _next_seq(self) -> int:
        return self._unanswered.last_seq + 1

    def _is_current(self, result: ForwardResult) -> bool:
        identity, term = result.identity, self.term
        return (identity.epoch, identity.term, identity.incarnation) == (term.epoch, term.term, term.info.incarnation)


def device_seq(report: Report, pair: tuple[int, int]) -> int:
    """The plan of the term `pair` that the device is computing by that report; 0: none."""
    is_computing = report.pair == pair and report.finished_seq < report.started_seq
    return report.started_seq if is_computing else 0


def may_reopen(error: EngineError) -> bool:
    """Whether the network, not the worker, may have ended the stream: a refusal and a listener that is gone are no."""
    return isinstance(error, ConnectionLost | DataFault) or type(error) is UnavailableError


def is_death(error: EngineError) -> bool:
    """Whether a term that ended so may have been ended by what the worker was computing."""
    gone = isinstance(error, UnavailableError) and not isinstance(error, Draining)
    return gone or isinstance(error, WrongIncarnation | DeviceFault)
