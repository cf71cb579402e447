"""The only device seam of the worker service.

Everything above it (rpc, protocol) is free of torch; everything below it is free of grpc. Implemented by
`worker_svc/tp_model_worker.py` and by fakes in tests.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from protos.wire.enums import GraphPhase
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from protos.wire.worker_info import Buckets, WorkerInfo

DEVICE_THREAD = "device"
PREPARATION_THREAD = "graph preparation"
UNENDED_THREADS = frozenset({DEVICE_THREAD, PREPARATION_THREAD})
"""Names of daemon threads that may still be in C++ when the worker ends: in a compiler, or in a step."""


class Executor(Protocol):
    """Runs plans one at a time on the thread that owns the device."""

    def worker_info(self) -> WorkerInfo:
        """Geometry, limits and features; the same object for the process's life."""
        ...

    def execute(self, plan: ForwardPlan) -> ForwardResult:
        """Run a validated plan and wait for its result.

        Raises:
            UnsupportedFeature: before the device is touched, when the plan needs what this executor lacks.
            DeviceFault: the device can no longer be used.
        """
        ...

    def reset(self) -> None:
        """Wait for the device and forget every step (token ring). KV pages and weights stay."""
        ...

    def close(self) -> None:
        """Release the device."""
        ...


@runtime_checkable
class StagingExecutor(Executor, Protocol):
    """An executor with host work that can be done ahead, while the device runs an earlier plan."""

    def stage(self, plan: ForwardPlan, digest: bytes | None = None) -> Callable[[], ForwardResult]:
        """Prepare a validated plan off the device thread; what is left runs there, in the order of plans.

        `execute(plan)` is `stage(plan)()`. A staged plan may be dropped.

        Args:
            plan: validated.
            digest: of the plan, where it is known.

        Raises:
            UnsupportedFeature: the plan needs what this executor lacks.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureTotals:
    """What captures of one phase have come to so far."""

    captured: int = 0
    failed: int = 0
    seconds: float = 0.0
    graph_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureProgress:
    """One moment of an executor's captures, replaced as a whole. Any thread may read it."""

    buckets: tuple[Buckets, ...] = ()
    totals: Mapping[GraphPhase, CaptureTotals] = field(default_factory=dict)
    is_done: bool = True
    """Every bucket is live or dead."""


GiveWay = Callable[[float], None]
"""Asked before a piece of so many milliseconds: returns when it may run. Plans run inside, on the same thread."""


class Captures(Protocol):
    """Prepares faster ways to run plans while the executor already serves. The device thread decides when."""

    @property
    def progress(self) -> CaptureProgress:
        """How far it is. Any thread."""
        ...

    @property
    def wait_s(self) -> float:
        """How long a piece that would hold up plans noticeably may wait for an idle device."""
        ...

    def next_ms(self, *, is_idle: bool) -> float | None:
        """About how long the next piece takes, inf if nobody knows; None when nothing can be captured now.

        Then `progress.is_done` says whether anything ever will: what is prepared elsewhere comes later.
        """
        ...

    def capture_next(self, give_way: GiveWay, *, is_idle: bool) -> None:
        """Make one capture, asking `give_way` between its pieces. A failure is the bucket's, never the caller's.

        What `give_way` raises passes; the bucket is as if it had not been tried.
        """
        ...


@runtime_checkable
class CapturingExecutor(Executor, Protocol):
    """An executor that may have something to capture."""

    @property
    def captures(self) -> Captures | None:
        """None: nothing."""
        ...


class MemoryOfDevice(Protocol):
    """Memory that others than the KV pools and graphs have. Any thread."""

    @property
    def weights_bytes(self) -> int:
        """Of the model."""
        ...

    def free_bytes(self) -> int:
        """What nobody has now."""
        ...


@runtime_checkable
class MeasuredExecutor(Executor, Protocol):
    """An executor that may know its device's memory."""

    @property
    def memory(self) -> MemoryOfDevice | None:
        """None: there is none to speak of."""
        ...
