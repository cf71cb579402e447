"""Which bucket is captured next, and what became of each: serving goes on while graphs are captured.

Asked by the device thread when it has nothing to do, or between two plans. Knows no plans, and of threads only that
preparations have one of their own: a bucket that needs one can be captured when it has ended. Guards:
the largest bucket of the worker is captured first; a bucket that cannot be captured is dead, counted and logged, and
nothing else changes.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

import torch

from protos.wire.buckets import PHASES, real_units
from protos.wire.enums import GraphPhase, GraphRefusal
from protos.wire.worker_info import Buckets
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.batch.sink_batch import sink_batch
from worker_svc.device.device_graph import GraphDevice
from worker_svc.executor import CaptureProgress, CaptureTotals, GiveWay
from worker_svc.graph_backends.base import Preparation
from worker_svc.graph_backends.kept_tensors import KeptTensors
from worker_svc.runners.eligibility import GraphState
from worker_svc.runners.graph_runner import GraphRunner
from worker_svc.runners.preparations import FAILURES, Preparations

logger = logging.getLogger(__name__)

_NS_PER_MS = 1_000_000

Bucket = tuple[GraphPhase, int]
Remember = Callable[[Mapping[GraphPhase, int]], None]
"""Takes the bytes of each phase when everything is captured."""


def at_once(piece_ms: float) -> None:
    """Go on."""


def forget(bytes_by_phase: Mapping[GraphPhase, int]) -> None:
    """Keep nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureParts:
    """What all captures of a worker share."""

    device: GraphDevice
    kept: KeptTensors
    num_sub_pools: int
    torch_device: torch.device
    is_divisible: bool = True
    """Other forwards may run inside a capture. Not where attention holds one plan of a step at a time."""
    wait_s: float = 0.0
    """See `Captures.wait_s`."""
    remember: Remember = forget


@dataclass(slots=True)
class _PieceTimes:
    """Nanoseconds for each token of the pieces of one phase, as far as they are known."""

    first: float | None = None
    """The warm-up."""
    later: float | None = None
    """The pieces behind it, in the middle: most are alike, and the first of a process takes memory."""


@dataclass(slots=True)
class _Attempt:
    """One capture that goes on."""

    bucket: Bucket
    began_ns: int
    pieces_ns: list[int] = field(default_factory=list)

    @property
    def spent_ns(self) -> int:
        """On all pieces so far, and on nothing that ran between them."""
        return sum(self.pieces_ns)


class GraphCaptures:
    """Owns the state of every bucket of the given runners. Used by the device thread only, but for `progress`."""

    def __init__(self, runners: Sequence[GraphRunner], *, parts: CaptureParts, clock_ns: Callable[[], int]) -> None:
        self.runners = tuple(runners)
        self.parts = parts
        self._examples = {
            runner.shapes.phase: sink_batch(
                runner.shapes.mode, num_sub_pools=parts.num_sub_pools, device=parts.torch_device
            )
            for runner in self.runners
        }
        self._clock_ns = clock_ns
        self._misses: Counter[Bucket] = Counter()
        self._times = {runner.shapes.phase: _PieceTimes() for runner in self.runners}
        self._totals = {runner.shapes.phase: CaptureTotals() for runner in self.runners}
        self._preparations: Preparations[Bucket] = Preparations(clock_ns)
        self._unprepared = self._to_prepare()
        self.progress = self._progress()

    @property
    def wait_s(self) -> float:
        """See `Captures.wait_s`."""
        return self.parts.wait_s

    def missed(self, batch: ForwardBatch, reason: GraphRefusal) -> None:
        """A batch runs eagerly. If that is because its bucket is not captured yet, it is wanted."""
        phase = PHASES.get(batch.forward_mode)
        if reason is GraphRefusal.NOT_CAPTURED_YET and phase is not None:
            self.note_miss(phase, real_units(phase, num_rows=batch.num_reqs, num_tokens=batch.num_tokens))

    def note_miss(self, phase: GraphPhase, units: int) -> None:
        """A forward of this many rows or tokens ran eagerly because its bucket was not captured yet."""
        for runner in self.runners:
            if runner.shapes.phase is phase:
                wanted = next((size for size in runner.shapes.sizes if size >= units), None)
                if wanted is not None:
                    self._misses[phase, wanted] += 1

    def next_bucket(self, *, is_idle: bool) -> Bucket | None:
        """What to capture now; None when every bucket is live, dead or being prepared.

        The largest of all comes first, since the others live in its memory; then, while idle, the largest that is
        left, and under load the one that was missed most.
        """
        pending = [bucket for bucket in self._pending() if bucket not in self._unprepared]
        if not pending:
            return None
        largest = max(pending, key=lambda entry: entry[1])
        if is_idle or not any(totals.captured for totals in self._totals.values()):
            return largest
        most_missed = max(pending, key=lambda entry: (self._misses[entry], entry[1]))
        return most_missed if self._misses[most_missed] else largest

    def next_ms(self, *, is_idle: bool) -> float | None:
        """See `Captures.next_ms`."""
        self._look_after_preparations()
        chosen = self.next_bucket(is_idle=is_idle)
        return None if chosen is None else _predicted_ms(self._times[chosen[0]].first, chosen[1])

    def capture_next(self, give_way: GiveWay = at_once, *, is_idle: bool) -> None:
        """See `Captures.capture_next`."""
        chosen = self.next_bucket(is_idle=is_idle)
        if chosen is not None:
            self.capture(*chosen, give_way=give_way)

    def capture(self, phase: GraphPhase, bucket: int, *, give_way: GiveWay = at_once) -> bool:
        """Capture a pending bucket; whether it is live now.

        `give_way` is called between pieces and may run other forwards, replays included, but no other capture.
        """
        runner = self._runner(phase)
        before, attempt = self._bytes(), _Attempt((phase, bucket), self._clock_ns())

        def pause() -> None:
            if not self.parts.is_divisible:
                return
            self._piece_ended(attempt)
            give_way(_predicted_ms(self._later(attempt), bucket))
            attempt.began_ns = self._clock_ns()

        try:
            runner.capture(bucket, example=self._examples[phase], pause=pause)
        except FAILURES as error:
            _log_failure(attempt.bucket, error)
            return self._settle(attempt.bucket, spent_ns=attempt.spent_ns, is_live=False, grown=self._bytes() - before)
        self._piece_ended(attempt)
        self._learn(attempt)
        return self._settle(attempt.bucket, spent_ns=attempt.spent_ns, is_live=True, grown=self._bytes() - before)

    def _to_prepare(self) -> dict[Bucket, Preparation]:
        """What has to be done before buckets can be captured, the largest first."""
        found: dict[Bucket, Preparation] = {}
        for phase, size in sorted(self._pending(), key=lambda entry: -entry[1]):
            work = self._runner(phase).preparation(size, example=self._examples[phase])
            if work is not None:
                found[phase, size] = work
        return found

    def _look_after_preparations(self) -> None:
        """Take note of one that has ended, and start the next."""
        ended = self._preparations.take_ended()
        if ended is not None:
            del self._unprepared[ended.key]
            if ended.problem is None:
                self._spent(ended.key[0], ended.nanoseconds)
            else:
                _log_failure(ended.key, ended.problem)
                self._settle(ended.key, spent_ns=ended.nanoseconds, is_live=False, grown=0)
        if self._unprepared and not self._preparations.is_running:
            self._preparations.start(*next(iter(self._unprepared.items())))

    def _runner(self, phase: GraphPhase) -> GraphRunner:
        return next(runner for runner in self.runners if runner.shapes.phase is phase)

    def _spent(self, phase: GraphPhase, nanoseconds: int) -> None:
        totals = self._totals[phase]
        self._totals[phase] = replace(totals, seconds=totals.seconds + nanoseconds / 1e9)

    def _pending(self) -> list[Bucket]:
        return [
            (runner.shapes.phase, size)
            for runner in self.runners
            for size in runner.shapes.sizes
            if runner.shapes.state(size) is GraphState.PENDING
        ]

    def _bytes(self) -> int:
        return self.parts.device.pool_bytes() + self.parts.kept.num_bytes()

    def _piece_ended(self, attempt: _Attempt) -> None:
        attempt.pieces_ns.append(self._clock_ns() - attempt.began_ns)

    def _later(self, attempt: _Attempt) -> float:
        """Of the next piece of a capture: as its own so far, or as those of one before, or no longer than its warm-up.

        A breakable capture has dozens of short pieces behind a long warm-up: taken to be as long, each of them would
        wait for an idle device that never comes under load. One that others held up says nothing of the next.
        """
        phase, bucket = attempt.bucket
        warm_up, *later = attempt.pieces_ns
        if later:
            return median_low(later) / bucket
        known = self._times[phase].later
        return warm_up / bucket if known is None else known

    def _learn(self, attempt: _Attempt) -> None:
        phase, bucket = attempt.bucket
        first, *later = attempt.pieces_ns
        self._times[phase] = _PieceTimes(first / bucket, median_low(later) / bucket if later else None)

    def _settle(self, bucket: Bucket, *, spent_ns: int, is_live: bool, grown: int) -> bool:
        phase, size = bucket
        self._runner(phase).shapes.states[size] = GraphState.LIVE if is_live else GraphState.DEAD
        self._spent(phase, spent_ns)
        totals = self._totals[phase]
        self._totals[phase] = replace(
            totals,
            captured=totals.captured + is_live,
            failed=totals.failed + (not is_live),
            graph_bytes=totals.graph_bytes + grown,
        )
        self.progress = self._progress()
        if self.progress.is_done:
            self._all_done()
        return is_live

    def _all_done(self) -> None:
        for phase, totals in self._totals.items():
            extra = {"phase": phase.name, "captured": totals.captured, "failed": totals.failed}
            spent = {"seconds": round(totals.seconds, 3), "graph_bytes": totals.graph_bytes}
            logger.info("graphs captured", extra={**extra, **spent})
        self.parts.remember({phase: totals.graph_bytes for phase, totals in self._totals.items()})

    def _progress(self) -> CaptureProgress:
        return CaptureProgress(
            buckets=tuple(
                Buckets(
                    phase=runner.shapes.phase,
                    sizes=tuple(runner.shapes.sizes),
                    live=runner.shapes.in_state(GraphState.LIVE),
                    slots=runner.shapes.slots,
                    dead=runner.shapes.in_state(GraphState.DEAD),
                    graph_bytes=self._totals[runner.shapes.phase].graph_bytes,
                    capture_ms=int(1000 * self._totals[runner.shapes.phase].seconds),
                )
                for runner in self.runners
            ),
            totals=dict(self._totals),
            is_done=not self._pending(),
        )


def _log_failure(bucket: Bucket, error: Exception) -> None:
    phase, size = bucket
    logger.warning("a graph could not be captured", extra={"phase": phase.name, "bucket": size, "why": str(error)})


def _predicted_ms(ns_per_token: float | None, bucket: int) -> float:
    return math.inf if ns_per_token is None else ns_per_token * bucket / _NS_PER_MS
