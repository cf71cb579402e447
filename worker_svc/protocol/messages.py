"""What goes into the ordering protocol and what comes out of it, as frozen types.

Streams and attach calls are named by integers that the shell mints; the protocol only compares them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from protos.wire.errors import EngineError
from protos.wire.plan import ForwardPlan, PlanIdentity
from protos.wire.result import ForwardResult, PlanRejection
from protos.wire.worker_info import WorkerInfo


class Fence(NamedTuple):
    """(epoch, term), compared as a pair."""

    epoch: int
    term: int


# --- into the protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachCall:
    """What a scheduler asks when it attaches. Equal ones are retries of each other."""

    epoch: int
    term: int
    protocol_min: int
    protocol_max: int
    features: tuple[int, ...] = ()
    """Values of `Feature` the scheduler may require; ones unknown here are fine."""
    scheduler_name: str = ""

    @property
    def fence(self) -> Fence:
        """The pair this call wants."""
        return Fence(self.epoch, self.term)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOpening:
    """First message of a plan stream."""

    epoch: int
    term: int
    incarnation: bytes
    stream_number: int
    """Raised by the scheduler each time it opens the stream of one (epoch, term)."""

    @property
    def fence(self) -> Fence:
        """The pair this stream belongs to."""
        return Fence(self.epoch, self.term)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeTimes:
    """What reading a plan took. Carried to the device thread, never looked at by the protocol."""

    receive_ns: int = 0
    parse_ns: int = 0
    parsed_at_ns: int = 0
    """On the clock of the shell."""


@dataclass(frozen=True, slots=True)
class MissingBase:
    """What is left of a plan that changes another one which is not here."""


@dataclass(frozen=True, slots=True)
class ArrivedPlan:
    """A plan whose bytes could be read: valid, refused before the device is touched, or of no use without its base."""

    identity: PlanIdentity
    content: ForwardPlan | PlanRejection | MissingBase
    times: IntakeTimes = IntakeTimes()
    run: Callable[[], ForwardResult] | None = None
    """What the device thread has to call. Of a plan that is not rejected; never looked at by the protocol."""

    @property
    def fence(self) -> Fence:
        """The pair this plan was made under."""
        return Fence(self.identity.epoch, self.identity.term)


# --- out of the protocol


@dataclass(frozen=True, slots=True)
class AnswerAttach:
    """The attach call succeeded."""

    call: int
    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class RefuseAttach:
    """The attach call failed."""

    call: int
    error: EngineError


@dataclass(frozen=True, slots=True)
class Execute:
    """Run this plan on the device and report `plan_finished`. At most one is out at a time."""

    plan: ForwardPlan
    times: IntakeTimes
    run: Callable[[], ForwardResult] | None = None


@dataclass(frozen=True, slots=True)
class ResetExecutor:
    """Forget every step of older pairs and report `executor_reset`. No plan is out when this is given."""

    fence: Fence


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The result of a plan, in seq order."""

    result: ForwardResult


@dataclass(frozen=True, slots=True)
class SequenceGapAnswer:
    """Link answer: a plan between `expected_seq` and `received_seq` is missing."""

    expected_seq: int
    received_seq: int


@dataclass(frozen=True, slots=True)
class StaleAnswer:
    """Link answer: `seq` was executed and its result is no longer kept."""

    seq: int
    expected_seq: int


@dataclass(frozen=True, slots=True)
class NeedFullAnswer:
    """Link answer: `seq` is expected in full; what was sent behind it is dropped."""

    seq: int


@dataclass(frozen=True, slots=True)
class OpenedAnswer:
    """Link answer: the stream is open; the first seq that has not started is expected."""

    expected_seq: int


@dataclass(frozen=True, slots=True)
class DrainAnswer:
    """Link answer: this worker is about to leave."""

    reason: str


ReplyBody = PlanResult | NeedFullAnswer | SequenceGapAnswer | StaleAnswer | OpenedAnswer | DrainAnswer


@dataclass(frozen=True, slots=True)
class Reply:
    """Send this on the stream, behind what was sent before."""

    stream: int
    body: ReplyBody


@dataclass(frozen=True, slots=True)
class EndStream:
    """End the call, behind what was sent before: with the error's status, or normally."""

    stream: int
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class Stopped:
    """Nothing runs on the device and nothing will."""


Action = AnswerAttach | RefuseAttach | Execute | ResetExecutor | Reply | EndStream | Stopped
