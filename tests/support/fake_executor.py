"""A deterministic executor without torch whose device can be held up and broken: `FakeWorker` below the service."""

import threading

from protos.wire.errors import EngineError
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from protos.wire.worker_info import WorkerInfo
from tests.support.fake_worker import FakeWorker


class FakeExecutor(FakeWorker):
    """Counts every call. Used from the device thread; the controls are for the test's thread."""

    def __init__(self, info: WorkerInfo, *, fault_at_seq: int = 0, fault: Exception | None = None) -> None:
        self.resets = -1
        """Resets asked for by an attach."""
        self.entered = 0
        """Plans that came here at all, refused ones included."""
        self.is_closed = False
        self.threads: set[str] = set()
        self.may_run = threading.Event()
        self.may_run.set()
        self._fault_at_seq = fault_at_seq
        self._fault = fault
        super().__init__(info)

    @property
    def calls(self) -> int:
        return len(self.executed)

    def execute(self, plan: ForwardPlan) -> ForwardResult:
        self.entered += 1
        self.threads.add(threading.current_thread().name)
        assert self.may_run.wait(timeout=30), "the test forgot the device"
        if self._fault is not None and plan.identity.seq == self._fault_at_seq:
            if isinstance(self._fault, EngineError):
                self._fault.plan_seq = plan.identity.seq
            raise self._fault
        # The service consumes the seq of a plan that it rejects by itself.
        self._next_seq = max(self._next_seq, plan.identity.seq)
        return super().execute(plan)

    def reset(self) -> None:
        self.resets += 1
        super().reset()

    def close(self) -> None:
        self.is_closed = True
        super().close()
