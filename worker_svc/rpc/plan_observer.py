"""Turns finished plans into metrics. Runs in the event loop, behind the answer; changes nothing else."""

import time

import numpy as np

from protos.service.tracing import SpanKind, SpanStart, Tracing
from protos.wire.enums import GraphPhase, RowFailure
from protos.wire.plan import ForwardPlan, GraphChoice
from protos.wire.result import ForwardOutcome, ForwardResult
from worker_svc.batch.forward_mode import traits_of
from worker_svc.metrics import PlanOutcome, WorkerMetrics

_NS = 1e-9


class PlanObserver:
    """One per process."""

    def __init__(self, metrics: WorkerMetrics, tracing: Tracing | None = None) -> None:
        """Count in `metrics`; plans whose scheduler traces them get a span in `tracing`."""
        self._metrics = metrics
        self._tracing = tracing

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
        metrics.plans.h2d_seconds.observe(timings.host_to_device_ns * _NS)
        for outcome in result.forwards:
            self._forward_ran(outcome)
        if result.rows is not None and result.rows.failures is not None:
            metrics.process.nan_rows.inc(int(np.count_nonzero(result.rows.failures == RowFailure.NAN)))
        if self._tracing is not None and plan.identity.traceparent:
            _trace(self._tracing, plan, result)

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


def _trace(tracing: Tracing, plan: ForwardPlan, result: ForwardResult) -> None:
    """A span of the plan's time on this worker, and one of each stage in it; they end now."""
    timings = result.timings
    stages = {
        "receive": timings.receive_ns,
        "parse": timings.parse_ns,
        "wait": timings.wait_ns,
        "host to device": timings.host_to_device_ns,
        "forward": timings.forward_ns,
        "sample": timings.sample_ns,
        "device to host": timings.device_to_host_ns,
    }
    end_ns = time.time_ns()
    begin_ns = end_ns - sum(stages.values())
    start = SpanStart(name="plan on worker", kind=SpanKind.SERVER, parent=plan.identity.traceparent, begin_ns=begin_ns)
    span = tracing.begin(start, _plan_attributes(plan, result))
    for name, taken_ns in stages.items():
        if taken_ns:
            stage = tracing.begin(SpanStart(name=name, parent=span.traceparent, begin_ns=begin_ns), {})
            stage.end(end_ns=begin_ns + taken_ns)
        begin_ns += taken_ns
    span.end(end_ns=end_ns)


def _plan_attributes(plan: ForwardPlan, result: ForwardResult) -> dict[str, str | int | float]:
    forward = result.forwards[0] if result.forwards else None
    attributes: dict[str, str | int | float] = {
        "forwardplane.plan.seq": plan.identity.seq,
        "forwardplane.plan.rows": plan.rows.num_rows,
        "forwardplane.plan.tokens": len(plan.tokens.ids),
        "forwardplane.plan.bubble_seconds": result.timings.bubble_ns * _NS,
    }
    if forward is not None:
        attributes["forwardplane.plan.mode"] = forward.mode.name.lower()
        attributes["forwardplane.plan.padded_tokens"] = forward.padded_tokens
        graph = forward.graph
        attributes["forwardplane.plan.graph"] = (
            f"{graph.phase.name.lower()} {graph.bucket}" if isinstance(graph, GraphChoice) else graph.name.lower()
        )
    return attributes
