"""Every metric of the core process, declared once. Edges declare what callers see in `scheduler_svc/edge/metrics.py`.

Knows nothing of who measures. Labels come from enums and from the configured worker addresses only.
"""

from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from protos.service.histogram_buckets import SCHEDULER_HISTOGRAMS, BucketTable
from protos.service.histogram_metrics import Histograms
from protos.wire.enums import FinishReason, WorkerState

PREFIX = "forwardplane_scheduler_"


class CheckOutcome(StrEnum):
    """What a check of the core's books found."""

    OK = "ok"
    BROKEN = "broken"


class Renewal(StrEnum):
    """What came of one try to renew the Lease."""

    OK = "ok"
    CONFLICT = "conflict"
    """Another wrote it at the same moment."""
    FAILED = "failed"
    """The API server did not answer, or refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Requests and tokens, as the core counts them. Set by the loop."""

    finished: Counter
    refused: Counter
    running: Gauge
    waiting: Gauge
    waiting_by_reason: Gauge
    prompt_tokens: Counter
    prompt_tokens_cached: Counter
    output_tokens: Counter
    retractions: Counter
    migrations: Counter
    queue_seconds: Histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One core step and what it plans. Set by the loop."""

    build_seconds: Histogram
    loop_lag_seconds: Histogram
    scheduled_tokens: Counter
    batch_rows: Histogram
    kv_pages: Gauge
    kv_pages_used: Gauge
    kv_pages_cached: Gauge
    kv_usage_ratio: Gauge
    budget_tokens: Gauge
    prediction_error_ratio: Gauge
    prediction_ratio: Histogram
    invariant_checks: Counter


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarMetrics:
    """Structured output. Set by who asks the grammar processes."""

    compile_seconds: Histogram
    mask_seconds: Histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMetrics:
    """The prefix caches of all workers. Set by the loop."""

    queried_tokens: Counter
    hit_tokens: Counter
    evicted_pages: Counter


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMetrics:
    """The plan path to all workers. Set by the links, through `LinkMetrics`."""

    encode_seconds: Histogram
    plan_bytes: Histogram
    rtt_seconds: Histogram
    overhead_seconds: Histogram
    in_flight: Gauge
    padded_tokens: Counter
    nacks: Counter
    resends: Counter
    reopened: Counter
    late_results: Counter


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMetrics:
    """State of the workers. Set by the links, through `LinkMetrics`."""

    up: Gauge
    suspect: Gauge
    state: Gauge
    losses: Counter
    attach_refusals: Counter
    epoch: Gauge
    leader: Gauge
    lease_renewals: Counter


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreMetrics:
    """All of them. Made by the core's composition root."""

    requests: RequestMetrics
    step: StepMetrics
    cache: CacheMetrics
    grammar: GrammarMetrics
    plans: PlanMetrics
    workers: WorkerMetrics
    build: Info
    model: Info
    kv_cache: Info

    def describe(self, *, model: str, architecture: str, weights: str) -> None:
        """Say once what this process is and serves."""
        self.build.info({"version": metadata.version("forwardplane")})
        self.model.info({"name": model, "architecture": architecture, "weights": weights})
        self.describe_cache(page_size=0, num_pages=0)

    def describe_cache(self, *, page_size: int, num_pages: int) -> None:
        """Say how much the attached workers' caches of whole sequences hold; zeros while none is attached."""
        self.kv_cache.info({"page_size": str(page_size), "num_pages": str(num_pages)})

    def forget_worker(self, worker: str) -> None:
        """It is no longer known: its series end, or they would grow with every pod that ever was."""
        step, plans, workers = self.step, self.plans, self.workers
        for metric in (
            *(step.budget_tokens, step.prediction_error_ratio, step.prediction_ratio),
            *(plans.rtt_seconds, plans.overhead_seconds, plans.in_flight, plans.reopened),
            *(workers.up, workers.state, workers.losses, workers.attach_refusals, workers.suspect),
        ):
            metric.remove_by_labels({"worker": worker})


@dataclass(frozen=True, slots=True)
class LinkMetrics:
    """The metrics of one worker's link: the `worker` label is its configured address."""

    plans: PlanMetrics
    workers: WorkerMetrics
    worker: str

    def set_state(self, state: WorkerState | None) -> None:
        """The worker's state as it last reported it; None: not attached."""
        self.workers.up.labels(self.worker).set(state is not None)
        for member in WorkerState:
            self.workers.state.labels(self.worker, member.name.lower()).set(member is state)

    def set_suspect(self, *, is_suspect: bool) -> None:
        """Whether the worker is late, or its stream is broken."""
        self.workers.suspect.labels(self.worker).set(is_suspect)

    def plan_answered(self, *, rtt_s: float, worker_s: float) -> None:
        """One round trip, and the part of it that the worker accounts for."""
        self.plans.rtt_seconds.labels(self.worker).observe(rtt_s)
        self.plans.overhead_seconds.labels(self.worker).observe(max(0.0, rtt_s - worker_s))

    def padded(self, num_tokens: int) -> None:
        """A plan's forwards were padded by so many tokens, to the sizes of captured graphs."""
        self.plans.padded_tokens.inc(num_tokens)

    def set_in_flight(self, num_plans: int) -> None:
        """Plans without a result."""
        self.plans.in_flight.labels(self.worker).set(num_plans)

    def lost(self, reason: str) -> None:
        """The term ended; `reason` is a name of the error taxonomy."""
        self.workers.losses.labels(self.worker, reason).inc()

    def attach_refused(self, reason: str) -> None:
        """An attach failed, on either side; `reason` is a name of the error taxonomy."""
        self.workers.attach_refusals.labels(self.worker, reason).inc()


def create_metrics(registry: CollectorRegistry, buckets: BucketTable = SCHEDULER_HISTOGRAMS) -> CoreMetrics:
    """All metrics of the core process, registered."""
    histogram = Histograms(PREFIX, registry, buckets)
    return CoreMetrics(
        requests=_request_metrics(registry, histogram),
        step=_step_metrics(registry, histogram),
        cache=_cache_metrics(registry),
        grammar=_grammar_metrics(histogram),
        plans=_plan_metrics(registry, histogram),
        workers=_worker_metrics(registry),
        build=Info(PREFIX + "build", "Version of this process.", registry=registry),
        model=Info(PREFIX + "model", "Model that this scheduler serves.", registry=registry),
        kv_cache=Info(PREFIX + "cache", "Tokens of a KV page, and usable pages of all workers.", registry=registry),
    )


def _request_metrics(registry: CollectorRegistry, histogram: Histograms) -> RequestMetrics:
    finished = Counter(PREFIX + "requests_finished", "Requests that ended, by reason.", ["reason"], registry=registry)
    for reason in FinishReason:
        finished.labels(reason.name.lower())
    return RequestMetrics(
        finished=finished,
        refused=Counter(
            PREFIX + "request_rejections", "Requests the core refused or failed.", ["reason"], registry=registry
        ),
        running=Gauge(PREFIX + "requests_running", "Requests that hold pages of a worker.", registry=registry),
        waiting=Gauge(PREFIX + "requests_waiting", "Requests that wait for admission.", registry=registry),
        waiting_by_reason=Gauge(
            PREFIX + "requests_waiting_by_reason",
            "Of the requests that wait, those that wait for this.",
            ["reason"],
            registry=registry,
        ),
        prompt_tokens=Counter(PREFIX + "prompt_tokens", "Prompt tokens of ended requests.", registry=registry),
        prompt_tokens_cached=Counter(
            PREFIX + "prompt_tokens_cached", "Prompt tokens found in a prefix cache.", registry=registry
        ),
        output_tokens=Counter(PREFIX + "output_tokens", "Output tokens released.", registry=registry),
        retractions=Counter(PREFIX + "retractions", "Requests retracted to give their pages back.", registry=registry),
        migrations=Counter(PREFIX + "migrations", "Requests that lost their worker.", ["cause"], registry=registry),
        queue_seconds=histogram("queue_seconds", "From a request's arrival in the core to its first plan."),
    )


def _step_metrics(registry: CollectorRegistry, histogram: Histograms) -> StepMetrics:
    return StepMetrics(
        build_seconds=histogram("step_build_seconds", "Time of one core step."),
        loop_lag_seconds=histogram("loop_lag_seconds", "From an event's arrival to its core step."),
        scheduled_tokens=Counter(
            PREFIX + "scheduled_tokens", "Tokens planned; a row of one token is decode.", ["phase"], registry=registry
        ),
        batch_rows=histogram("batch_rows", "Rows of a plan."),
        kv_pages=Gauge(PREFIX + "kv_pages", "Usable KV pages of attached workers.", registry=registry),
        kv_pages_used=Gauge(PREFIX + "kv_pages_used", "KV pages that requests hold.", registry=registry),
        kv_pages_cached=Gauge(
            PREFIX + "kv_pages_cached", "KV pages in a prefix cache that no request holds.", registry=registry
        ),
        budget_tokens=Gauge(
            PREFIX + "budget_tokens", "Prefill tokens a plan may carry.", ["worker"], registry=registry
        ),
        prediction_error_ratio=Gauge(
            PREFIX + "step_prediction_error_ratio",
            "Mean relative error of predicted device times, recently.",
            ["worker"],
            registry=registry,
        ),
        prediction_ratio=histogram(
            "step_prediction_ratio",
            "Measured device time of a plan over what was predicted when it was sent.",
            "worker",
        ),
        invariant_checks=_invariant_checks(registry),
        kv_usage_ratio=Gauge(
            PREFIX + "kv_usage_ratio", "Used share of the fullest sub-pool's KV pages.", registry=registry
        ),
    )


def _invariant_checks(registry: CollectorRegistry) -> Counter:
    checks = Counter(
        PREFIX + "invariant_checks", "Checks of the core's own books, by outcome.", ["outcome"], registry=registry
    )
    for outcome in CheckOutcome:
        checks.labels(outcome.value)
    return checks


def _cache_metrics(registry: CollectorRegistry) -> CacheMetrics:
    return CacheMetrics(
        queried_tokens=Counter(
            PREFIX + "prefix_cache_queried_tokens", "Known tokens of placed requests.", registry=registry
        ),
        hit_tokens=Counter(PREFIX + "prefix_cache_hit_tokens", "Of these, found in a cache.", registry=registry),
        evicted_pages=Counter(PREFIX + "prefix_cache_evicted_pages", "Cached pages given up.", registry=registry),
    )


def _grammar_metrics(histogram: Histograms) -> GrammarMetrics:
    return GrammarMetrics(
        compile_seconds=histogram(
            "grammar_compile_seconds", "Time in which a grammar process compiled a grammar that it did not know."
        ),
        mask_seconds=histogram(
            "grammar_mask_seconds", "From the core's question for a mask to its answer, waiting and compiling included."
        ),
    )


def _plan_metrics(registry: CollectorRegistry, histogram: Histograms) -> PlanMetrics:
    worker = ["worker"]
    return PlanMetrics(
        encode_seconds=histogram("plan_encode_seconds", "Time to encode one plan."),
        plan_bytes=histogram("plan_bytes", "Size of a plan.", "encoding"),
        rtt_seconds=histogram("plan_rtt_seconds", "From a plan's send to its result.", "worker"),
        overhead_seconds=histogram("plan_overhead_seconds", "Round trip less the worker's own time.", "worker"),
        in_flight=Gauge(PREFIX + "plans_in_flight", "Plans without a result.", worker, registry=registry),
        padded_tokens=_padded_tokens(registry),
        nacks=Counter(PREFIX + "plan_nacks", "Plans a worker did not run, by answer.", ["reason"], registry=registry),
        resends=Counter(PREFIX + "plan_resends", "Plans sent once more under their seq.", registry=registry),
        reopened=Counter(PREFIX + "plan_streams_reopened", "Tries to open a broken stream.", worker, registry=registry),
        late_results=Counter(
            PREFIX + "late_results", "Results that no plan in flight was waiting for.", registry=registry
        ),
    )


def _padded_tokens(registry: CollectorRegistry) -> Counter:
    padded = Counter(
        PREFIX + "padded_tokens", "Tokens that workers computed beside the planned ones.", ["kind"], registry=registry
    )
    return padded.labels("graph")


def _worker_metrics(registry: CollectorRegistry) -> WorkerMetrics:
    renewals = Counter(PREFIX + "lease_renewals", "Tries to renew the Lease.", ["outcome"], registry=registry)
    for outcome in Renewal:
        renewals.labels(outcome.value)
    return WorkerMetrics(
        up=Gauge(PREFIX + "worker_up", "1 while the worker is attached.", ["worker"], registry=registry),
        suspect=Gauge(PREFIX + "worker_suspect", "1 while the worker is late.", ["worker"], registry=registry),
        state=Gauge(PREFIX + "worker_state", "1 at the state last reported.", ["worker", "state"], registry=registry),
        losses=Counter(
            PREFIX + "worker_losses", "Terms that ended, by reason.", ["worker", "reason"], registry=registry
        ),
        attach_refusals=Counter(
            PREFIX + "attach_refusals", "Attaches that failed, by reason.", ["worker", "reason"], registry=registry
        ),
        epoch=Gauge(PREFIX + "epoch", "Highest epoch this scheduler has attached with.", registry=registry),
        leader=Gauge(PREFIX + "leader", "1 while this scheduler may serve, 0 while it waits warm.", registry=registry),
        lease_renewals=renewals,
    )
