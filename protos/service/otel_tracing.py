"""`Tracing` by OpenTelemetry. Loaded by name, and only where settings ask for traces.

A caller that decided is followed; else the ratio decides, by the trace's id.
"""

from importlib import metadata

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanContext, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace import SpanKind as OtelKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from protos.service.tracing import Attributes, SpanStart, TraceSettings

_EXPORT_TIMEOUT_S = 5
_HEADER = "traceparent"
_MS_A_SECOND = 1000
_PROPAGATOR = TraceContextTextMapPropagator()


class OtelSpan:
    """One span of the library."""

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        """Empty when it is not recorded."""
        if not self._span.get_span_context().trace_flags.sampled:
            return ""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, context=set_span_in_context(self._span, Context()))
        return carrier.get(_HEADER, "")

    def add(self, attributes: Attributes) -> None:
        """More attributes."""
        self._span.set_attributes(dict(attributes))

    def end(self, *, error: str = "", end_ns: int | None = None) -> None:
        """The span is over."""
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(end_time=end_ns)


class OtelTracing:
    """Spans of one provider."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("forwardplane", metadata.version("forwardplane"))

    def begin(self, start: SpanStart, attributes: Attributes) -> OtelSpan:
        """A span under its parent, whether that is of this process or not."""
        links = [Link(context) for context in map(_span_context, start.links) if context.is_valid]
        span = self._tracer.start_span(
            start.name,
            context=_context(start.parent),
            kind=OtelKind[start.kind.name],
            attributes=dict(attributes),
            links=links,
            start_time=start.begin_ns,
        )
        return OtelSpan(span)

    def close(self, timeout_s: float) -> None:
        """Send what is left."""
        self._provider.force_flush(int(timeout_s * _MS_A_SECOND))
        self._provider.shutdown()


def tracing_through(processor: SpanProcessor, settings: TraceSettings, *, service: str) -> OtelTracing:
    """Traces whose ended spans go to `processor`."""
    resource = Resource.create({"service.name": service, "service.version": metadata.version("forwardplane")})
    sampler = ParentBased(TraceIdRatioBased(settings.ratio))
    provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return OtelTracing(provider)


def exporting(settings: TraceSettings, *, service: str) -> OtelTracing:
    """Traces that are sent to the settings' endpoint, in a thread of their own."""
    assert settings.endpoint is not None, "asked for"
    exporter = OTLPSpanExporter(endpoint=settings.endpoint, timeout=_EXPORT_TIMEOUT_S)
    return tracing_through(BatchSpanProcessor(exporter), settings, service=service)


def _context(traceparent: str) -> Context:
    """Never the ambient one."""
    return _PROPAGATOR.extract({_HEADER: traceparent}, context=Context()) if traceparent else Context()


def _span_context(traceparent: str) -> SpanContext:
    return get_current_span(_context(traceparent)).get_span_context()
