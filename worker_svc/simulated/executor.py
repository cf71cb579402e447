"""SimulatedExecutor: a `StagingExecutor` whose device is a table of step times and whose pages are exact.

Knows nothing of grpc, order or requests. Host work (reading chains, sampling, packing) runs inside the step's time.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np

from protos.service.step_times import StepShape
from protos.wire.digest import plan_digest
from protos.wire.enums import GraphRefusal, RowFailure, RowStatus
from protos.wire.plan import Forward, ForwardPlan, GraphChoice
from protos.wire.result import ForwardOutcome, ForwardResult, PlanTimings, ResultColumns
from protos.wire.simulated_tokens import SimulatedVocabulary
from protos.wire.validate_features import check_column_features, check_forward_features
from protos.wire.worker_info import WorkerInfo
from worker_svc.simulated.device_clock import StepPacer
from worker_svc.simulated.kv_chains import ChainPool
from worker_svc.simulated.sampling import SampledRows, row_logprobs, sample_rows
from worker_svc.simulated.token_memory import ResolvedTokens, TokenMemory

Array = np.ndarray


class StepCost(Protocol):
    """How long a step takes."""

    def step_s(self, shape: StepShape) -> float:
        """Seconds."""
        ...


class SimulatedExecutor:
    """Made by `build`, all but `stage` belongs to the device thread."""

    def __init__(
        self, *, info: WorkerInfo, cost: StepCost, pool: ChainPool, vocabulary: SimulatedVocabulary, pacer: StepPacer
    ) -> None:
        self._info = info
        self._cost = cost
        self._pool = pool
        self._vocabulary = vocabulary
        self._pacer = pacer
        self._memory = TokenMemory(num_plans=info.limits.ring_plans)

    def worker_info(self) -> WorkerInfo:
        """Geometry, limits and features; the same object for the process's life."""
        return self._info

    def execute(self, plan: ForwardPlan) -> ForwardResult:
        """Run a validated plan and return when its step is over.

        Raises:
            UnsupportedFeature: before a page is written, when the plan needs what this worker lacks.
        """
        return self.stage(plan)()

    def stage(self, plan: ForwardPlan, digest: bytes | None = None) -> Callable[[], ForwardResult]:
        """Do what needs no earlier result; what is left is for the device thread.

        Args:
            plan: validated.
            digest: of the plan, where it is known.

        Raises:
            UnsupportedFeature: the plan needs what this worker lacks.
        """
        check_column_features(plan, self._info)
        check_forward_features(plan, self._info)
        return partial(self._execute, plan, digest or plan_digest(plan))

    def reset(self) -> None:
        """Forget the sampled tokens of every plan. Pages stay as they are."""
        self._memory.forget()

    def close(self) -> None:
        """Nothing is held that another process could want."""
        self._memory.forget()

    def _execute(self, plan: ForwardPlan, digest: bytes) -> ForwardResult:
        self._pacer.begin()
        tokens = self._memory.resolve(plan)
        chains = self._pool.advance(plan, tokens.ids, failed=tokens.failed)
        wanted = np.flatnonzero((plan.rows.samples != 0) & ~tokens.failed)
        sampled = sample_rows(plan, chains, rows=wanted, vocabulary=self._vocabulary, referenced=tokens.referenced)
        columns = _columns(plan, sampled, tokens)
        logprobs = row_logprobs(plan, sampled, vocabulary=self._vocabulary)
        self._memory.keep(plan.identity.seq, columns)
        step_s = sum(self._cost.step_s(_shape(plan, forward)) for forward in plan.forwards)
        forward_ns = int(self._pacer.finish(step_s) * 1e9)
        return ForwardResult(
            identity=plan.identity,
            rows=columns,
            forwards=_outcomes(plan, forward_ns),
            timings=PlanTimings(forward_ns=forward_ns),
            logprobs=logprobs,
            plan_digest=digest,
        )


def _columns(plan: ForwardPlan, sampled: SampledRows, tokens: ResolvedTokens) -> ResultColumns:
    rows = plan.rows
    statuses = np.full(rows.num_rows, RowStatus.NONE, np.uint8)
    statuses[sampled.rows] = np.where(sampled.has_candidate, RowStatus.TOKEN, RowStatus.FAILED)
    statuses[tokens.failed] = RowStatus.FAILED
    token_ids = np.zeros(rows.num_rows, np.int32)
    token_ids[sampled.rows] = sampled.token_ids
    failures = np.zeros(rows.num_rows, np.uint8)
    failures[sampled.rows[~sampled.has_candidate]] = RowFailure.NO_CANDIDATE
    failures[tokens.failed] = RowFailure.DEPENDENCY
    return ResultColumns(
        handles=rows.handles.copy(),
        attempts=rows.attempts.copy(),
        positions=(rows.seq_lens - 1).astype(np.int32),
        statuses=statuses,
        token_ids=token_ids,
        failures=failures if failures.any() else None,
        finite=np.ones(rows.num_rows, np.uint8),
    )


def _shape(plan: ForwardPlan, forward: Forward) -> StepShape:
    span = slice(forward.row_begin, forward.row_end)
    return StepShape(
        rows=forward.row_end - forward.row_begin,
        tokens=int(plan.rows.extend_lens[span].sum(dtype=np.int64)),
        context=int(plan.rows.seq_lens[span].sum(dtype=np.int64)),
    )


def _outcomes(plan: ForwardPlan, forward_ns: int) -> tuple[ForwardOutcome, ...]:
    shapes = [_shape(plan, forward) for forward in plan.forwards]
    total = sum(shape.tokens for shape in shapes) or 1
    return tuple(
        ForwardOutcome(
            mode=forward.mode,
            graph=GraphRefusal.DISABLED if isinstance(forward.graph, GraphChoice) else forward.graph,
            real_tokens=shape.tokens,
            padded_tokens=0,
            forward_ns=forward_ns * shape.tokens // total,
        )
        for forward, shape in zip(plan.forwards, shapes, strict=True)
    )
