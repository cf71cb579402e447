"""What the device thread does with plans, and the counters that only it advances.

Everything here but `stage` and reading `progress` runs on the device thread. Guards: a counter moves only when device
work ended.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import numpy as np

from protos.service.status import fault_border
from protos.wire.enums import RowFailure
from protos.wire.errors import EngineError, InvalidPlan, UnsupportedFeature
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from worker_svc.executor import (
    CaptureProgress,
    CapturingExecutor,
    Executor,
    MeasuredExecutor,
    MemoryOfDevice,
    StagingExecutor,
)
from worker_svc.protocol.messages import Execute, Fence

_NO_HANDLES = np.empty(0, np.uint64)
NO_FENCE = Fence(0, 0)
"""Below every pair that can attach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProgress:
    """One moment of the device thread, replaced as a whole. Any thread may read it."""

    fence: Fence = NO_FENCE
    """The pair that the two seqs belong to."""
    last_started_seq: int = 0
    last_finished_seq: int = 0
    device_counter: int = 0
    """Finished pieces of device work."""
    nan_rows: int = 0
    canary_hits: int = 0
    busy_ns: int = 0
    """Time of finished work."""
    idle_ns: int = 0
    """Time between finished pieces of work."""
    bubble_ns: int = 0
    """Of that, the time before a plan that carries on a request of the plan before it."""
    capture_budget_ms: int = 0
    """What the piece of a capture that runs now may take; 0: none runs."""
    is_busy: bool = False
    budget_ms: int = 0
    """Time that the piece of work may take; 0: nobody said."""
    since_ns: int = 0
    """When the device last became busy or idle."""

    def taken(self, now_ns: int, *, budget_ms: int = 0) -> "DeviceProgress":
        """The thread begins a piece of work."""
        idle_ns = self.idle_ns + now_ns - self.since_ns
        return replace(self, is_busy=True, budget_ms=budget_ms, since_ns=now_ns, idle_ns=idle_ns)

    def finished(self, now_ns: int) -> "DeviceProgress":
        """The piece of work is done."""
        return replace(
            self,
            is_busy=False,
            since_ns=now_ns,
            busy_ns=self.busy_ns + now_ns - self.since_ns,
            device_counter=self.device_counter + 1,
        )


class DeviceWork:
    """One executor as the device thread sees it. Made on that thread when the executor is loaded."""

    def __init__(self, executor: Executor, clock_ns: Callable[[], int]) -> None:
        self._executor = executor
        self._clock_ns = clock_ns
        self._last_handles = _NO_HANDLES
        self.progress = DeviceProgress(since_ns=clock_ns())

    def stage(self, plan: ForwardPlan, digest: bytes | None = None) -> Callable[[], ForwardResult]:
        """What is left to do on the device thread, after what the executor can do ahead. Called on any thread.

        Args:
            plan: validated.
            digest: of the plan, where it is known.

        Raises:
            UnsupportedFeature: the plan needs what the executor lacks.
        """
        if not isinstance(self._executor, StagingExecutor):
            return partial(self._executor.execute, plan)
        try:
            with fault_border("staging"):
                return self._executor.stage(plan, digest)
        except (InvalidPlan, UnsupportedFeature):
            raise
        except EngineError as error:
            # A bug below the executor ends the process in the plan's turn, wherever it shows.
            return partial(_fail, error)

    def execute(self, planned: Execute) -> ForwardResult:
        """The plan's result, with what happened before the device in its timings.

        Raises:
            EngineError: as `Executor.execute`.
        """
        plan, times = planned.plan, planned.times
        run = planned.run or self.stage(plan)
        taken_ns = self._clock_ns()
        waited_ns = taken_ns - self.progress.since_ns
        progress = self.progress.taken(taken_ns, budget_ms=plan.identity.budget_ms)
        self.progress = replace(progress, last_started_seq=plan.identity.seq)
        result = run()
        self.progress = _counted(self.progress.finished(self._clock_ns()), result)
        handles = plan.rows.handles
        bubble_ns = waited_ns if np.isin(handles, self._last_handles).any() else 0
        self.progress = replace(self.progress, bubble_ns=self.progress.bubble_ns + bubble_ns)
        self._last_handles = handles
        timings = replace(
            result.timings,
            receive_ns=times.receive_ns,
            parse_ns=times.parse_ns,
            wait_ns=taken_ns - times.parsed_at_ns,
            bubble_ns=bubble_ns,
        )
        return replace(result, timings=timings)

    def reset(self, fence: Fence) -> None:
        """Forget every step; the seqs start again under `fence`."""
        self.progress = self.progress.taken(self._clock_ns())
        self._executor.reset()
        self._last_handles = _NO_HANDLES
        self.progress = replace(
            self.progress.finished(self._clock_ns()), fence=fence, last_started_seq=0, last_finished_seq=0
        )

    def captures(self) -> CaptureProgress:
        """How far the executor's captures are. Any thread."""
        if isinstance(self._executor, CapturingExecutor) and self._executor.captures is not None:
            return self._executor.captures.progress
        return CaptureProgress(buckets=self._executor.worker_info().buckets)

    @property
    def memory(self) -> MemoryOfDevice | None:
        """What the executor knows of its device's memory."""
        return self._executor.memory if isinstance(self._executor, MeasuredExecutor) else None

    def capture_piece_begins(self, *, budget_ms: int) -> None:
        """A piece of a capture takes the device."""
        self.progress = replace(self.progress, capture_budget_ms=budget_ms)

    def capture_piece_ended(self) -> None:
        """It has given it back."""
        self.progress = replace(self.progress, capture_budget_ms=0, device_counter=self.progress.device_counter + 1)

    def close(self) -> None:
        """Release the device."""
        self._executor.close()


def _fail(error: EngineError) -> NoReturn:
    raise error


def _counted(progress: DeviceProgress, result: ForwardResult) -> DeviceProgress:
    failures = result.rows.failures if result.rows is not None else None
    nan_rows = 0 if failures is None else int(np.count_nonzero(failures == RowFailure.NAN))
    return replace(
        progress,
        last_finished_seq=result.identity.seq,
        nan_rows=progress.nan_rows + nan_rows,
        canary_hits=progress.canary_hits + sum(outcome.canary_hits for outcome in result.forwards),
    )
