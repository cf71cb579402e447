"""The only device seam of the worker service.

Everything above it (rpc, protocol) is free of torch; everything below it is free of grpc. Implemented by
`worker_svc/tp_model_worker.py` and by fakes in tests.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from protos.wire.worker_info import WorkerInfo


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

    def stage(self, plan: ForwardPlan) -> Callable[[], ForwardResult]:
        """Prepare a validated plan off the device thread; what is left runs there, in the order of plans.

        `execute(plan)` is `stage(plan)()`. A staged plan may be dropped.

        Raises:
            UnsupportedFeature: the plan needs what this executor lacks.
        """
        ...
