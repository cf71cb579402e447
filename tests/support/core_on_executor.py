"""The scheduling core with a real executor, in one process: plans and results go through their bytes, nothing else."""

from dataclasses import replace

import numpy as np

from protos.wire.codec import decode_plan, decode_result, encode_plan, encode_result
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from protos.wire.validate import validate_plan
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.events import Instruction, MaskReady, NeedMask
from scheduler_svc.core.settings import CoreSettings
from tests.support.core_harness import CoreHarness
from tests.support.fake_worker import mix
from worker_svc.executor import Executor


class ThroughBytes:
    """An `Executor` that another one executes for."""

    def __init__(self, executor: Executor, info: WorkerInfo) -> None:
        self._executor = executor
        self._info = info

    def worker_info(self) -> WorkerInfo:
        return self._info

    def execute(self, plan: ForwardPlan) -> ForwardResult:
        arrived = decode_plan(encode_plan(plan))
        validate_plan(arrived, self._info)
        return decode_result(encode_result(self._executor.execute(arrived)))

    def reset(self) -> None:
        self._executor.reset()

    def close(self) -> None:
        pass


class AroundExecutor(CoreHarness):
    """The harness around one executor, with as many plans in flight and as many pages as the test says."""

    def __init__(self, executor: Executor, settings: CoreSettings | None = None) -> None:
        super().__init__(settings)
        self._executor = executor

    def attach_with(self, *, window: int, num_pages: int | None = None, max_rows: int | None = None) -> None:
        info = self._executor.worker_info()
        limits = replace(info.limits, window=window, max_rows=max_rows or info.limits.max_rows)
        (pool,) = info.sub_pools
        self.attach(
            info=replace(info, limits=limits, sub_pools=(replace(pool, num_pages=num_pages or pool.num_pages),))
        )


class CoreOnExecutor(AroundExecutor):
    """One whose plans and results go through their bytes, with made-up masks."""

    def make_worker(self, info: WorkerInfo) -> Executor:
        self._executor.reset()
        return ThroughBytes(self._executor, info)

    def answer_mask(self) -> list[Instruction]:
        return self.step(grammar_answer(self.masks.popleft(), self._executor.worker_info().logits_width))


def grammar_answer(wanted: NeedMask, logits_width: int) -> MaskReady:
    """A made-up grammar: half of the ids, chosen by the whole output."""
    output = wanted.output_ids.tolist()
    flags = np.random.default_rng(mix(len(wanted.grammar.source), *output)).integers(0, 2, logits_width, np.uint8)
    return MaskReady(wanted.stream, len(output), np.packbits(flags, bitorder="little"))
