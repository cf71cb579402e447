"""Where spans arrive in tests: an OTLP receiver over gRPC, and the in-memory exporter behind our own tracing."""

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from typing_extensions import override

from protos.service.otel_tracing import OtelTracing, tracing_through
from protos.service.tracing import TraceSettings


@dataclass(frozen=True)
class ReceivedSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, object]
    error: str


@dataclass
class SpanReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    endpoint: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)

    @override
    def Export(self, request, context):
        for group in request.resource_spans:
            service = _values(group.resource.attributes)["service.name"]
            for scope in group.scope_spans:
                self.spans += [_received(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]


@contextmanager
def span_receiver() -> Iterator[SpanReceiver]:
    receiver = SpanReceiver()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()


def in_memory(*, ratio: float = 1.0) -> tuple[OtelTracing, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    settings = TraceSettings(endpoint="http://nowhere:1", ratio=ratio)
    return tracing_through(SimpleSpanProcessor(exporter), settings, service="test"), exporter


def _received(service, span) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        error=span.status.message,
    )


def _values(attributes) -> dict[str, object]:
    return {found.key: _value(found.value) for found in attributes}


def _value(value):
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
