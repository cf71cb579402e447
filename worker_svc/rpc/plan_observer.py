"""Turns finished plans into metrics. Runs in the event loop, behind the answer; changes nothing else."""

import numpy as np

from protos.wire.enums import GraphPhase, RowFailure
from protos.wire.plan import ForwardPlan, GraphChoice
from protos.wire.result import ForwardOutcome, ForwardResult
from worker_svc.batch.forward_mode import traits_of
from worker_svc.metrics import PlanOutcome, WorkerMetrics

_NS = 1e-9


class PlanObserver:
    """One per process."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics

    def plan_unreadable(self) -> None:
        """A message of a plan stream could not be read."""
        self._metrics.count_plan(PlanOutcome.UNREADABLE)

    def plan_rejected(self) -> None:
        """A plan was refused before the device was touched."""
        self._metrics.count_plan(PlanOutcome.REJECTED)

    def device_failed(self) -> None:
        """The device cannot be used any more."""
        self._metrics.count_plan(PlanOutcome.FAILED)
        self._metrics.process.fatal_errors.inc()

    def plan_executed(self, plan: ForwardPlan, result: ForwardResult) -> None:
        """The device ran a plan."""
        metrics, timings = self._metrics, result.timings
        metrics.count_plan(PlanOutcome.EXECUTED)
        metrics.plans.batch_rows.observe(plan.rows.num_rows)
        metrics.plans.parse_seconds.observe(timings.parse_ns * _NS)
        metrics.plans.sample_seconds.observe(timings.sample_ns * _NS)
        for outcome in result.forwards:
            self._forward_ran(outcome)
        if result.rows is not None and result.rows.failures is not None:
            metrics.process.nan_rows.inc(int(np.count_nonzero(result.rows.failures == RowFailure.NAN)))

    def _forward_ran(self, outcome: ForwardOutcome) -> None:
        traits = traits_of(outcome.mode)
        if not traits.runs_model:
            return
        self._metrics.process.canary_hits.inc(outcome.canary_hits)
        self._metrics.forward_ran(outcome.mode, seconds=outcome.forward_ns * _NS)
        if isinstance(outcome.graph, GraphChoice):
            self._metrics.graph_replayed(
                outcome.graph.phase, outcome.graph.bucket, real=outcome.real_tokens, padded=outcome.padded_tokens
            )
        else:
            # Modes without graphs of their own are counted with prefill, as MIXED is.
            phase = traits.graph_phase or GraphPhase.PREFILL
            self._metrics.graph_missed(phase, outcome.graph, real=outcome.real_tokens)
