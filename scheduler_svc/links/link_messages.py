"""What travels between a link and its worker, as frozen types. No grpc, no I/O."""

from dataclasses import dataclass

from protos.wire.codec import checksum, encode_plan
from protos.wire.enums import WorkerState
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from protos.wire.worker_info import Buckets, WorkerInfo

MIN_DELTA_BYTES = 128 * 1024
"""Below this, making, digesting and undoing a delta costs both sides more than the bytes it saves."""


@dataclass(frozen=True, slots=True)
class EncodedPlan:
    """A plan as it travels. Made by `encoded`."""

    seq: int
    body: bytes
    crc32: int
    is_delta: bool


@dataclass(frozen=True, slots=True)
class DrainAnnounced:
    """The worker is about to leave."""

    reason: str


@dataclass(frozen=True, slots=True)
class LinkNack:
    """The worker did not run a plan and the term cannot go on: `stale`, or an answer this release does not know."""

    kind: str


@dataclass(frozen=True, slots=True)
class FullPlanNeeded:
    """The worker lacks the base of plan `seq`, and dropped what was sent behind it."""

    seq: int


@dataclass(frozen=True, slots=True)
class PlansMissing:
    """The worker expects `expected_seq` and got `received_seq`."""

    expected_seq: int
    received_seq: int


StreamAnswer = ForwardResult | DrainAnnounced | FullPlanNeeded | PlansMissing | LinkNack


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One report of a worker."""

    incarnation: bytes
    state: WorkerState | None
    """None: a state this release does not know."""
    device_counter: int
    capture_budget_s: float
    pair: tuple[int, int] = (0, 0)
    """Epoch and term of the two seqs."""
    started_seq: int = 0
    """The newest plan that the device thread has taken."""
    finished_seq: int = 0
    """The newest one that it has finished."""
    buckets: tuple[Buckets, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """What a successful attach agreed on."""

    worker: str
    epoch: int
    term: int
    info: WorkerInfo


def encoded(plan: ForwardPlan) -> EncodedPlan:
    """The bytes of `plan` and their checksum."""
    body = encode_plan(plan)
    return EncodedPlan(plan.identity.seq, body, checksum(body), is_delta=plan.delta is not None)
