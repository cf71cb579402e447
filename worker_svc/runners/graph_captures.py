"""Which bucket is captured next, and what became of each: serving goes on while graphs are captured.

Asked by the device thread when it has nothing to do, or between two plans. Knows neither threads nor plans. Guards:
the largest bucket of the worker is captured first; a bucket that cannot be captured is dead, counted and logged, and
nothing else changes.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from protos.wire.enums import ForwardMode, GraphPhase
from protos.wire.errors import EngineError
from protos.wire.worker_info import Buckets
from worker_svc.batch.sink_batch import sink_batch
from worker_svc.device.device_graph import CaptureError, GraphDevice
from worker_svc.graph_backends.base import Pause, no_pause
from worker_svc.graph_backends.kept_tensors import KeptTensors
from worker_svc.runners.eligibility import GraphState
from worker_svc.runners.graph_runner import GraphRunner

logger = logging.getLogger(__name__)

_MODES = {GraphPhase.DECODE: ForwardMode.DECODE, GraphPhase.PREFILL: ForwardMode.EXTEND}
_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureTotals:
    """What captures of one phase have cost so far. Replaced as a whole; any thread may read it."""

    captured: int = 0
    failed: int = 0
    seconds: float = 0.0
    graph_bytes: int = 0


class GraphCaptures:
    """Owns the state of every bucket of the given runners. Used by the device thread only, but for reading totals."""

    def __init__(
        self,
        runners: Sequence[GraphRunner],
        *,
        device: GraphDevice,
        kept: KeptTensors,
        num_sub_pools: int,
        torch_device: torch.device,
        clock_ns: Callable[[], int],
    ) -> None:
        self._runners = tuple(runners)
        self._device = device
        self._kept = kept
        self._examples = {
            runner.shapes.phase: sink_batch(
                _MODES[runner.shapes.phase], num_sub_pools=num_sub_pools, device=torch_device
            )
            for runner in self._runners
        }
        self._clock_ns = clock_ns
        self._misses: Counter[tuple[GraphPhase, int]] = Counter()
        self._ns_per_token: dict[GraphPhase, float] = {}
        self.totals = {runner.shapes.phase: CaptureTotals() for runner in self._runners}

    def buckets(self) -> tuple[Buckets, ...]:
        """Sizes, and which of them can be replayed now."""
        return tuple(
            Buckets(
                phase=runner.shapes.phase,
                sizes=tuple(runner.shapes.sizes),
                live=runner.shapes.live(),
                slots=runner.shapes.slots,
            )
            for runner in self._runners
        )

    def note_miss(self, phase: GraphPhase, units: int) -> None:
        """A forward of this many rows or tokens ran eagerly because its bucket was not captured yet."""
        for runner in self._runners:
            if runner.shapes.phase is phase:
                wanted = next((size for size in runner.shapes.sizes if size >= units), None)
                if wanted is not None:
                    self._misses[phase, wanted] += 1

    def next_bucket(self, *, is_idle: bool) -> tuple[GraphPhase, int] | None:
        """What to capture now; None when every bucket is live or dead.

        The largest of all comes first, since the others live in its memory; then, while idle, the largest that is
        left, and under load the one that was missed most.
        """
        pending = [
            (runner.shapes.phase, size)
            for runner in self._runners
            for size in runner.shapes.sizes
            if runner.shapes.state(size) is GraphState.PENDING
        ]
        if not pending:
            return None
        largest = max(pending, key=lambda entry: entry[1])
        if is_idle or not any(totals.captured for totals in self.totals.values()):
            return largest
        most_missed = max(pending, key=lambda entry: (self._misses[entry], entry[1]))
        return most_missed if self._misses[most_missed] else largest

    def predicted_ms(self, phase: GraphPhase, bucket: int) -> float:
        """Of a whole capture, from those before; 0 without one."""
        return self._ns_per_token.get(phase, 0.0) * bucket / _NS_PER_MS

    def capture(self, phase: GraphPhase, bucket: int, *, pause: Pause = no_pause) -> bool:
        """Capture a pending bucket; whether it is live now.

        `pause` is called between pieces and may run other forwards, replays included, but no other capture.
        """
        runner = next(runner for runner in self._runners if runner.shapes.phase is phase)
        before, began = self._bytes(), self._clock_ns()
        paused_ns = 0

        def timed_pause() -> None:
            nonlocal paused_ns
            at = self._clock_ns()
            pause()
            paused_ns += self._clock_ns() - at

        try:
            runner.capture(bucket, example=self._examples[phase], pause=timed_pause)
        except (CaptureError, EngineError, RuntimeError) as error:
            # torch tells of a device without memory, or of an operator that it cannot run, by RuntimeError.
            logger.warning(
                "a graph could not be captured", extra={"phase": phase.name, "bucket": bucket, "why": str(error)}
            )
            return self._settle(runner, bucket, is_live=False, spent_ns=0, grown=self._bytes() - before)
        spent_ns = self._clock_ns() - began - paused_ns
        self._ns_per_token[phase] = spent_ns / bucket
        return self._settle(runner, bucket, is_live=True, spent_ns=spent_ns, grown=self._bytes() - before)

    def _bytes(self) -> int:
        return self._device.pool_bytes() + self._kept.num_bytes()

    def _settle(self, runner: GraphRunner, bucket: int, *, is_live: bool, spent_ns: int, grown: int) -> bool:
        phase = runner.shapes.phase
        runner.shapes.states[bucket] = GraphState.LIVE if is_live else GraphState.DEAD
        totals = self.totals[phase]
        self.totals[phase] = CaptureTotals(
            captured=totals.captured + is_live,
            failed=totals.failed + (not is_live),
            seconds=totals.seconds + spent_ns / 1e9,
            graph_bytes=totals.graph_bytes + grown,
        )
        return is_live
