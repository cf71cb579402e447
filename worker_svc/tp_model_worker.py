"""TpModelWorker: one rank that turns a plan into a result. Stage, dispatch, sample, pack.

Coordinates only: how each step is done is in the parts it is given. Knows nothing of grpc, order or requests, and keeps
nothing of a plan once its result is returned but the tokens in the ring.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from protos.wire.digest import plan_digest
from protos.wire.errors import DeviceFault
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardOutcome, ForwardResult
from protos.wire.worker_info import WorkerInfo
from worker_svc.batch.canary_guard import KVCanary, log_violations
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.batch.staging import PlanStaging, StagedPlan
from worker_svc.executor import Captures, MemoryOfDevice
from worker_svc.runners.dispatch import Dispatched, RunnerDispatch
from worker_svc.runners.stage_clock import Stage, StageClock
from worker_svc.sampling.row_results import RowResults


class TpModelWorker:
    """A `StagingExecutor` and a `CapturingExecutor`. Made by `worker_svc/build.py`.

    All but `stage` belongs to the device thread.
    """

    def __init__(
        self,
        *,
        info: WorkerInfo,
        staging: PlanStaging,
        dispatch: RunnerDispatch,
        canary: KVCanary | None = None,
        captures: Captures | None = None,
        memory: MemoryOfDevice | None = None,
    ) -> None:
        self.captures = captures
        self.memory = memory
        self._info = info
        self._staging = staging
        self._dispatch = dispatch
        self._canary = canary

    def worker_info(self) -> WorkerInfo:
        """Geometry, limits and features; the same object for the process's life."""
        return self._info

    def execute(self, plan: ForwardPlan) -> ForwardResult:
        """Run a validated plan and wait for its result.

        Raises:
            UnsupportedFeature: before the device is touched, when the plan needs what this worker lacks.
            DeviceFault: the device can no longer be used.
        """
        return self.stage(plan)()

    def stage(self, plan: ForwardPlan, digest: bytes | None = None) -> Callable[[], ForwardResult]:
        """Prepare all of a validated plan that needs no earlier result; what is left is for the device thread.

        Args:
            plan: to be prepared.
            digest: of the plan, where it is known.

        Raises:
            UnsupportedFeature: the plan needs what this worker lacks.
        """
        return partial(self._execute, self._staging.stage(plan), digest or plan_digest(plan))

    def reset(self) -> None:
        """Forget every sampled token. `execute` waits for the device, so nothing runs now."""
        self._staging.forget()

    def close(self) -> None:
        """Let go of weights, pools and runners; no plan may follow."""
        self._dispatch = RunnerDispatch(())

    def _execute(self, staged: StagedPlan, digest: bytes) -> ForwardResult:
        plan, clock = staged.plan, StageClock()
        results = RowResults(plan, logits_width=self._info.logits_width, to_host=self._staging.to_host)
        try:
            with torch.inference_mode():
                ready = self._staging.ready(staged)
                results.add_lost(ready.lost_rows)
                step = _Step(plan, results, clock, ready.lost_rows)
                clock.lap(Stage.HOST_TO_DEVICE)
                outcomes = tuple(
                    self._run(step, batch, first_row=forward.row_begin)
                    for forward, batch in zip(plan.forwards, ready.batches, strict=True)
                )
                rows = results.columns()
                self._staging.ran(staged, rows)
        except RuntimeError as error:
            # torch has no narrower type for what a device or its memory can do to a running forward.
            raise DeviceFault("a forward failed on the device", plan_seq=plan.identity.seq) from error
        logprobs, hidden_states = results.logprobs(), results.hidden_states()
        clock.lap(Stage.DEVICE_TO_HOST)
        return ForwardResult(
            identity=plan.identity,
            rows=rows,
            forwards=outcomes,
            timings=clock.timings(),
            logprobs=logprobs,
            hidden_states=hidden_states,
            plan_digest=digest,
        )

    def _run(self, step: "_Step", batch: ForwardBatch, *, first_row: int) -> ForwardOutcome:
        results, clock = step.results, step.clock
        dispatched = self._dispatch.choose(batch)
        if not batch.runs_model:
            return _outcome(batch, dispatched)
        # Before padding, which knows nothing of rows that are refused.
        batch, hits = self._guarded(step, batch, first_row=first_row)
        output = dispatched.runner.forward(batch)
        results.add_finite(self._staging.to_host(output.finite)[0], first_row=first_row)
        forward_ns = clock.lap(Stage.FORWARD)
        if batch.sampling is not None:
            results.add_sampled(
                output.logits, batch.sampling, first_row=first_row, wanted=batch.logprobs, best=output.best
            )
        results.add_inputs(
            batch,
            last_hidden=output.last_hidden,
            hidden=output.hidden,
            logits_of=dispatched.runner.logits,
            first_row=first_row,
        )
        clock.lap(Stage.SAMPLE)
        return replace(_outcome(batch, dispatched), forward_ns=forward_ns, canary_hits=hits)

    def _guarded(self, step: "_Step", batch: ForwardBatch, *, first_row: int) -> tuple[ForwardBatch, int]:
        """The batch to run, and how many of its rows would read another's KV."""
        if self._canary is None:
            return batch, 0
        rows = slice(first_row, first_row + batch.num_reqs)
        batch, verdict = self._canary.guard(batch, self._canary.expected(step.plan.rows, rows))
        verdict = verdict.without(step.lost_rows[rows])
        if verdict.violations:
            log_violations(verdict, first_row=first_row, handles=step.plan.rows.handles)
            if self._canary.fails_rows:
                step.results.add_corrupt(verdict.is_bad, first_row=first_row)
        return batch, int(verdict.is_bad.sum())


class _Step(NamedTuple):
    """One plan on its way through the device."""

    plan: ForwardPlan
    results: RowResults
    clock: StageClock
    lost_rows: np.ndarray
    """[R] bool: they failed already, and what they read need not have been written."""


def _outcome(batch: ForwardBatch, dispatched: Dispatched) -> ForwardOutcome:
    return ForwardOutcome(
        mode=batch.forward_mode,
        graph=dispatched.graph,
        real_tokens=batch.real_tokens,
        padded_tokens=dispatched.runner.padded_tokens(batch),
        forward_ns=0,
    )
