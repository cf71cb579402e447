"""Core and executor in one thread, without edge, gRPC or processes: what is compared where no network is meant.

A turn is everything between two forwards: result into the core, next plan, both codecs, validation, batch, forward,
sampling, result.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from protos.service.model_files import ModelFolder
from protos.wire.codec import decode_plan, decode_result, encode_plan, encode_result
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from protos.wire.validate import validate_plan
from scheduler_svc.core import events
from scheduler_svc.core.scheduler import step
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state import SchedulerState
from worker_svc.build import build_tp_model_worker
from worker_svc.runners.executor_settings import ExecutorSettings
from worker_svc.tp_model_worker import TpModelWorker

Ids = Sequence[int] | np.ndarray
GREEDY = events.Sampling()
MOST_ROWS, NUM_PAGES, BUDGET_TOKENS = 64, 2400, 2048


@contextmanager
def native_worker(folder: ModelFolder, *, threads: int) -> Iterator[TpModelWorker]:
    """An executor on the native kernels, fast numerics."""
    settings = ExecutorSettings(
        numerics="fast", kernels="native", num_pages=NUM_PAGES, max_rows=MOST_ROWS, threads=threads
    )
    built = build_tp_model_worker(folder, settings)
    try:
        yield built
    finally:
        built.close()


class Engine:
    """One run of requests that all begin at once. The executor is lent."""

    def __init__(
        self,
        executor: TpModelWorker,
        prompts: Sequence[Ids],
        *,
        max_tokens: int,
        sampling: events.Sampling = GREEDY,
    ) -> None:
        self.executor, self.info = executor, executor.worker_info()
        self.state = SchedulerState.create(CoreSettings(budget_tokens=BUDGET_TOKENS))
        self.results: list[ForwardResult] = []
        step(self.state, [events.WorkerAttached("w0", self.info, 1, 1)], 0.0)
        submitted = [
            events.RequestSubmitted(
                events.RequestSpec(
                    stream=events.StreamKey(0, index),
                    request_id=str(index),
                    prompt_ids=np.asarray(ids, np.int32),
                    sampling=sampling,
                    max_tokens=max_tokens,
                    deadline_s=1e9,
                )
            )
            for index, ids in enumerate(prompts)
        ]
        self._rows = len(prompts)
        self.pending = _sent(step(self.state, submitted, 0.0))

    def fill(self) -> None:
        """Turns until every row decodes."""
        while any(len(plan.rows.handles) < self._rows or plan.rows.extend_lens.max() > 1 for plan in self.pending):
            self.turn()
        self.results.clear()

    def turn(self) -> float:
        """Seconds of one."""
        begin = time.perf_counter()
        plan = decode_plan(encode_plan(self.pending.pop(0)))
        validate_plan(plan, self.info)
        result = decode_result(encode_result(self.executor.execute(plan)))
        self.pending += _sent(step(self.state, [events.ResultReceived("w0", result)], 0.0))
        self.results.append(result)
        return time.perf_counter() - begin


def generated(executor: TpModelWorker, prompts: Sequence[Ids], *, new_tokens: int) -> float:
    """Seconds from submitting all prompts until each has so many tokens."""
    begin = time.perf_counter()
    engine = Engine(executor, prompts, max_tokens=new_tokens)
    while engine.pending:
        engine.turn()
    return time.perf_counter() - begin


def _sent(instructions: list[events.Instruction]) -> list[ForwardPlan]:
    return [instruction.plan for instruction in instructions if isinstance(instruction, events.SendPlan)]
