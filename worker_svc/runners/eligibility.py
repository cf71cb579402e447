"""The one function that says why a batch cannot replay a graph, and the state of the graphs that it asks about."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from protos.wire.buckets import OVER_MAX, real_units
from protos.wire.enums import ForwardMode, GraphPhase, GraphRefusal, HiddenMode
from worker_svc.batch.forward_batch import ForwardBatch


class GraphState(Enum):
    """Of one bucket."""

    PENDING = auto()
    LIVE = auto()
    DEAD = auto()
    """Its capture failed. It stays so until the next start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphShapes:
    """The shapes of one phase. Fixed at start."""

    phase: GraphPhase
    sizes: Sequence[int]
    """Ascending."""
    slots: int = 0
    """Most rows of a prefill graph. 0 in decode graphs, whose rows are the bucket."""
    width: int = 1
    """Tokens of every row of a decode graph. Above 1 it verifies drafts."""
    hidden_mode: HiddenMode = HiddenMode.NULL
    """What every graph captures."""
    is_debugged: bool = False
    """The forward is one marked call, so that all of it runs eagerly inside what a replay does around it."""
    states: dict[int, GraphState] = field(default_factory=dict)
    """By bucket; the capture's owner writes it. Absent: pending."""

    @property
    def mode(self) -> ForwardMode:
        """Of the steps that are captured."""
        if self.phase is GraphPhase.PREFILL:
            return ForwardMode.EXTEND
        return ForwardMode.DECODE if self.width == 1 else ForwardMode.TARGET_VERIFY

    @property
    def max_reqs(self) -> int:
        """Rows of the largest graph."""
        return self.slots if self.phase is GraphPhase.PREFILL else self.sizes[-1]

    def state(self, bucket: int) -> GraphState:
        """Of a bucket."""
        return self.states.get(bucket, GraphState.PENDING)

    def in_state(self, state: GraphState) -> tuple[int, ...]:
        """Buckets, ascending."""
        return tuple(size for size in self.sizes if self.state(size) is state)


_NOT_LIVE: Mapping[GraphState, GraphRefusal] = {
    GraphState.PENDING: GraphRefusal.NOT_CAPTURED_YET,
    GraphState.DEAD: GraphRefusal.CAPTURE_FAILED,
}


def why_not_replayed(batch: ForwardBatch, shapes: GraphShapes) -> GraphRefusal | None:
    """None if the bucket that the plan names can be replayed for this batch.

    The plan's own reason comes first: a worker never replays what the plan runs eagerly, nor another bucket.
    """
    choice = batch.graph
    if isinstance(choice, GraphRefusal):
        return choice
    if choice.phase is not shapes.phase:
        return GraphRefusal.MODE
    if choice.bucket not in shapes.sizes:
        return GraphRefusal.DISABLED
    if real_units(choice.phase, num_rows=batch.num_reqs, num_tokens=batch.num_tokens) > choice.bucket:
        return OVER_MAX[choice.phase]
    if choice.phase is GraphPhase.PREFILL and batch.num_reqs > shapes.slots:
        return GraphRefusal.TOO_MANY_SLOTS
    if choice.phase is GraphPhase.DECODE and not _has_width(batch, shapes.width):
        return GraphRefusal.MODE
    if batch.hidden is not None and batch.hidden.mode > shapes.hidden_mode:
        return GraphRefusal.HIDDEN_MODE
    return _NOT_LIVE.get(shapes.state(choice.bucket))


def _has_width(batch: ForwardBatch, width: int) -> bool:
    """Whether every row computes as many tokens as the graphs' rows have."""
    return (batch.extend is None) == (width == 1) and bool((batch.query_lens_host() == width).all())
