"""What a link has seen of its worker: plans in flight and counts since the core's start. No clock, no I/O."""

from collections import Counter
from dataclasses import dataclass, field

from protos.wire.buckets import PHASES
from protos.wire.enums import GraphPhase, GraphRefusal
from protos.wire.plan import GraphChoice
from protos.wire.result import ForwardResult, PlanTimings


@dataclass(slots=True)
class PhaseCounts:
    """How the forwards of one phase ran."""

    replays: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    misses: Counter[GraphRefusal] = field(default_factory=Counter)


@dataclass(slots=True)
class LinkCounts:
    """Counts since the core's start. Written by the link's sessions, read for the load answer."""

    plans: int = 0
    plan_rows: int = 0
    plan_bytes: int = 0
    graphs: dict[GraphPhase, PhaseCounts] = field(default_factory=dict)

    def sent(self, *, rows: int, size: int) -> None:
        """A plan went out."""
        self.plans += 1
        self.plan_rows += rows
        self.plan_bytes += size

    def answered(self, result: ForwardResult) -> None:
        """A result arrived."""
        for forward in result.forwards:
            phase = PHASES.get(forward.mode)
            if phase is None:  # nothing ran
                continue
            counts = self.graphs.setdefault(phase, PhaseCounts())
            if isinstance(forward.graph, GraphChoice):
                counts.replays += 1
                counts.real_tokens += forward.real_tokens
                counts.padded_tokens += forward.padded_tokens
            else:
                counts.misses[forward.graph] += 1


class InFlight:
    """Plans of one term without a result, oldest first."""

    def __init__(self) -> None:
        self._sent_at: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._sent_at)

    def add(self, seq: int, now: float) -> None:
        """A plan went out."""
        assert seq not in self._sent_at
        self._sent_at[seq] = now

    def oldest(self) -> int | None:
        """The seq whose result is due next."""
        return next(iter(self._sent_at), None)

    def pop(self, seq: int, now: float) -> float:
        """The plan's round trip in seconds; it is no longer in flight."""
        return now - self._sent_at.pop(seq)


def worker_seconds(timings: PlanTimings) -> float:
    """The part of a round trip that the worker accounts for."""
    total_ns = (
        timings.receive_ns
        + timings.parse_ns
        + timings.wait_ns
        + timings.host_to_device_ns
        + timings.forward_ns
        + timings.sample_ns
        + timings.device_to_host_ns
    )
    return total_ns / 1e9
