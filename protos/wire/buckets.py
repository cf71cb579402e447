"""Which captured graph a forward replays: the one bucket function of the project.

The scheduler calls it and writes the answer into the plan; the worker never picks another bucket.
"""

from collections.abc import Sequence
from types import MappingProxyType

from protos.wire.enums import ForwardMode, GraphPhase, GraphRefusal
from protos.wire.plan import GraphChoice
from protos.wire.worker_info import Buckets

PHASES = MappingProxyType(
    {
        ForwardMode.DECODE: GraphPhase.DECODE,
        ForwardMode.EXTEND: GraphPhase.PREFILL,
        ForwardMode.MIXED: GraphPhase.PREFILL,
    }
)
"""The graph family of each mode that may replay one."""

OVER_MAX = MappingProxyType(
    {GraphPhase.DECODE: GraphRefusal.OVER_MAX_ROWS, GraphPhase.PREFILL: GraphRefusal.OVER_MAX_TOKENS}
)

_MAX_PREFILL_PADDING = 2


def choose_bucket(
    buckets: Sequence[Buckets], *, mode: ForwardMode, num_rows: int, num_tokens: int
) -> GraphChoice | GraphRefusal:
    """The smallest captured size that holds the forward, or why it runs eagerly.

    Args:
        buckets: what the worker advertises, one entry a phase.
        mode: the forward's mode.
        num_rows: rows of the forward: what a decode bucket counts.
        num_tokens: tokens of the forward: what a prefill bucket counts.
    """
    if not buckets:
        return GraphRefusal.DISABLED
    phase = PHASES.get(mode)
    if phase is None:
        return GraphRefusal.MODE
    captured = next((entry for entry in buckets if entry.phase is phase), None)
    if captured is None or not captured.sizes:
        return GraphRefusal.DISABLED
    real = real_units(phase, num_rows=num_rows, num_tokens=num_tokens)
    bucket = next((size for size in captured.sizes if size >= real), None)
    if bucket is None:
        return OVER_MAX[phase]
    if phase is GraphPhase.PREFILL:
        if pads_too_much(bucket, real):
            return GraphRefusal.BUCKET_TOO_LARGE
        if num_rows > captured.slots:
            return GraphRefusal.TOO_MANY_SLOTS
    if bucket not in captured.live:
        return GraphRefusal.CAPTURE_FAILED if bucket in captured.dead else GraphRefusal.NOT_CAPTURED_YET
    return GraphChoice(phase=phase, bucket=bucket)


def pads_too_much(bucket: int, real: int) -> bool:
    """Whether a prefill bucket is above twice the real tokens: such a forward is quicker without a graph."""
    return bucket > _MAX_PREFILL_PADDING * real


def real_units(phase: GraphPhase, *, num_rows: int, num_tokens: int) -> int:
    """What a bucket of this phase counts."""
    return num_rows if phase is GraphPhase.DECODE else num_tokens
