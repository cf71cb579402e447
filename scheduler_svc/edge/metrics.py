"""Every metric of an edge process, declared once. The core's are in `scheduler_svc/metrics.py`.

Labels come from the schema's method names, the HTTP front's routes, gRPC's code names, the error taxonomy, and the
classes of the file of callers, which are few.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from protos.service.histogram_buckets import SCHEDULER_HISTOGRAMS, BucketTable
from protos.service.histogram_metrics import Histograms
from protos.wire.errors import EngineError

PREFIX = "forwardplane_scheduler_"


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeMetrics:
    """All of them. Made by the edge's composition root."""

    requests: Counter
    rejections: Counter
    open_calls: Gauge
    http_open_calls: Gauge
    held_bytes: Gauge
    caller_held_bytes: Gauge
    closed_connections: Counter
    first_token_seconds: Histogram
    inter_token_seconds: Histogram
    output_token_seconds: Histogram
    duration_seconds: Histogram
    prompt_tokens: Histogram
    output_tokens: Histogram
    tenant_tokens: Counter

    def tenant_used(self, tenant_class: str, *, prompt_tokens: int, output_tokens: int) -> None:
        """A generation of a caller of that class is over."""
        for kind, tokens in (("prompt", prompt_tokens), ("output", output_tokens)):
            self.tenant_tokens.labels(tenant_class, kind).inc(tokens)


class CallMetrics:
    """Counts calls for the status interceptor. Calls of other services on the port are not counted."""

    def __init__(self, metrics: EdgeMetrics, service_name: str) -> None:
        self._metrics = metrics
        self._prefix = f"/{service_name}/"

    def call_started(self, method: str) -> None:
        """A call of `method`, its full name with slashes, has arrived."""
        if method.startswith(self._prefix):
            self._metrics.open_calls.inc()

    def call_finished(self, method: str, code: str, *, seconds: float) -> None:
        """It ended with the gRPC code of that name."""
        if method.startswith(self._prefix):
            name = method.removeprefix(self._prefix)
            self._metrics.open_calls.dec()
            self._metrics.requests.labels(name, code).inc()
            if name in ("Generate", "GenerateOnce"):
                self._metrics.duration_seconds.observe(seconds)


class HttpCallMetrics:
    """Counts calls of the HTTP front, by route, with the gRPC code that the other door would have given."""

    def __init__(self, metrics: EdgeMetrics) -> None:
        self._metrics = metrics
        self.open_calls = 0

    def call_started(self) -> None:
        """A call has arrived."""
        self.open_calls += 1
        self._metrics.http_open_calls.inc()

    def call_finished(self, route: str, code: str, *, seconds: float) -> None:
        """It ended so."""
        self.open_calls -= 1
        self._metrics.http_open_calls.dec()
        self._metrics.requests.labels(route, code).inc()
        if route.endswith("/completions"):
            self._metrics.duration_seconds.observe(seconds)


@contextmanager
def counting_rejections(metrics: EdgeMetrics) -> Iterator[None]:
    """Counts an error that refuses a request at the door; it goes on."""
    try:
        yield
    except EngineError as error:
        metrics.rejections.labels(error.reason).inc()
        raise


def create_edge_metrics(registry: CollectorRegistry, buckets: BucketTable = SCHEDULER_HISTOGRAMS) -> EdgeMetrics:
    """All metrics of an edge process, registered."""
    histogram = Histograms(PREFIX, registry, buckets)
    return EdgeMetrics(
        requests=Counter(
            PREFIX + "requests", "Calls by method or route and gRPC code.", ["method", "code"], registry=registry
        ),
        rejections=Counter(
            PREFIX + "request_rejections", "Requests refused at the edge's door.", ["reason"], registry=registry
        ),
        open_calls=Gauge(PREFIX + "grpc_open_calls", "Calls that are being served.", registry=registry),
        http_open_calls=Gauge(PREFIX + "http_open_calls", "HTTP calls that are being served.", registry=registry),
        held_bytes=Gauge(
            PREFIX + "held_request_bytes", "Bytes of the running requests of an edge process.", registry=registry
        ),
        caller_held_bytes=Gauge(
            PREFIX + "caller_held_request_bytes", "The same of the caller with the most.", registry=registry
        ),
        closed_connections=Counter(
            PREFIX + "closed_connections",
            "Connections that wasted most of their calls.",
            registry=registry,
        ),
        first_token_seconds=histogram("time_to_first_token_seconds", "From a request's arrival to its first chunk."),
        inter_token_seconds=histogram("inter_token_latency_seconds", "Between two chunks of a stream, by token."),
        output_token_seconds=histogram("time_per_output_token_seconds", "Mean of one request behind its first chunk."),
        duration_seconds=histogram("request_duration_seconds", "From a generation call's arrival to its end."),
        prompt_tokens=histogram("request_prompt_tokens", "Prompt tokens of admitted requests."),
        output_tokens=histogram("request_output_tokens", "Output tokens of ended requests."),
        tenant_tokens=Counter(
            PREFIX + "tenant_tokens",
            "Tokens of ended requests, by the class that the file of callers names.",
            ["tenant_class", "kind"],
            registry=registry,
        ),
    )
