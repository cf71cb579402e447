"""The scheduling core with a real worker behind it: plans go through the codec and are validated, as on the wire."""

from collections.abc import Callable

import numpy as np

from protos.wire.codec import decode_plan, decode_result, encode_plan, encode_result
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from protos.wire.validate import validate_plan
from scheduler_svc.core.events import Instruction
from scheduler_svc.core.settings import CoreSettings
from tests.support.core_harness import CoreHarness
from worker_svc.executor import Executor


class RealWorker:
    """An executor as the harness wants its workers."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.info = executor.worker_info()

    def execute(self, plan: ForwardPlan) -> ForwardResult:
        plan = decode_plan(encode_plan(plan))
        validate_plan(plan, self.info)
        return decode_result(encode_result(self.executor.execute(plan)))


class ExecutorCore(CoreHarness):
    """One worker, `w0`. `watch` is called after every step of the core."""

    def __init__(self, executor: Executor, settings: CoreSettings | None = None) -> None:
        super().__init__(settings)
        self.watch: Callable[[], None] = lambda: None
        self.attach("w0", executor.worker_info())
        self.workers["w0"] = RealWorker(executor)

    @property
    def memory(self):
        return self.state.workers["w0"].memory

    def step(self, *events: object) -> list[Instruction]:
        out = super().step(*events)
        if hasattr(self, "watch"):
            self.watch()
        return out

    def window_pages(self) -> list[int]:
        """Pages of the window sub-pool that each running request holds."""
        running = self.state.workers["w0"].running.values()
        return [request.holding.lists[1].count for request in running if request.holding]


def listed_window_pages(plan: ForwardPlan) -> np.ndarray:
    """[num_rows] window pages that a plan lists for each row."""
    return np.diff(plan.page_tables[1].indptr)
