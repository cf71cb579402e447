"""The server span of a call: begins when it is admitted, ends with its streams. Attributes are those of `gen_ai`.

Knows neither door. Guards: a call that was refused, failed or left ends its span; nothing of what was asked or answered
is in it but counts and parameters.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from protos.forwardplane.v1.generate_pb2 import GenerateRequest
from protos.service.tracing import Attribute, OpenSpan, SpanKind, SpanStart, Tracing
from protos.wire.enums import FinishReason
from protos.wire.errors import EngineError
from scheduler_svc.edge.caller_stream import CallerStream

HEADER = "traceparent"
_MAX_HEADER_CHARS = 128
_PROVIDER = "forwardplane"
_LEFT, _BROKEN = "CALLER_LEFT", "INTERNAL"
_SAMPLING = frozenset({"temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed"})


class CallTrace:
    """Of one call."""

    def __init__(self, span: OpenSpan | None = None) -> None:
        """`span`: None where nobody traces."""
        self._span = span
        self.traceparent = "" if span is None else span.traceparent

    def asked(self, requests: Sequence[GenerateRequest], *, operation: str = "") -> None:
        """What the call asks for; parameters are those of its first request."""
        if self._span is None or not requests:
            return
        first = requests[0]
        spoken = "chat" if first.WhichOneof("prompt") == "chat" else "text_completion"
        attributes: dict[str, Attribute] = {"gen_ai.operation.name": operation or spoken}
        for field, value in first.sampling.ListFields():
            if field.name in _SAMPLING:
                attributes[f"gen_ai.request.{field.name}"] = value
        if first.stop.HasField("max_tokens"):
            attributes["gen_ai.request.max_tokens"] = first.stop.max_tokens
        if first.sampling.HasField("n"):
            attributes["gen_ai.request.choice.count"] = first.sampling.n
        if len(requests) > 1:
            attributes["forwardplane.prompts"] = len(requests)
        self._span.add(attributes)

    def over(self, streams: Sequence[CallerStream]) -> None:
        """Its streams have ended."""
        if self._span is None:
            return
        usages = [stream.usage for stream in streams]
        errors = [stream.error.reason for stream in streams if stream.error is not None]
        self._span.add(
            {
                "gen_ai.response.id": streams[0].names.request_id,
                "gen_ai.response.finish_reasons": [_finish_reason(stream) for stream in streams],
                "gen_ai.usage.input_tokens": sum(usage.prompt_tokens for usage in usages),
                "gen_ai.usage.cache_read.input_tokens": sum(usage.cached_tokens for usage in usages),
                "gen_ai.usage.output_tokens": sum(usage.output_tokens for usage in usages),
            }
        )
        self._span.end(error=errors[0] if errors else "")

    def failed(self, error: BaseException) -> None:
        """It was refused, failed, or its caller left before it had a stream."""
        if self._span is None:
            return
        is_left = isinstance(error, asyncio.CancelledError)
        self._span.end(error=error.reason if isinstance(error, EngineError) else _LEFT if is_left else _BROKEN)


class CallTraces:
    """One for the edge."""

    def __init__(self, tracing: Tracing | None, *, model: str) -> None:
        """`tracing`: None: off."""
        self._tracing = tracing
        self._model = model

    @contextmanager
    def admitting(self, method: str, carriers: Sequence[str | bytes]) -> Iterator[CallTrace]:
        """While the call is admitted; its streams end it later, with `over`, unless the block fails.

        Args:
            method: name of the gRPC method, or the HTTP route.
            carriers: `traceparent` headers of the call; used if there is one.
        """
        if self._tracing is None:
            yield CallTrace()
            return
        trace = CallTrace(self._tracing.begin(_start(method, carriers), self._attributes(method)))
        try:
            yield trace
        except BaseException as error:
            trace.failed(error)
            raise

    def _attributes(self, method: str) -> dict[str, Attribute]:
        named: dict[str, Attribute] = (
            {"http.route": method, "http.request.method": "POST"}
            if method.startswith("/v1/")
            else {"rpc.system": "grpc", "rpc.service": "forwardplane.v1.GenerationService", "rpc.method": method}
        )
        return named | {
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
        }


def _start(method: str, carriers: Sequence[str | bytes]) -> SpanStart:
    name = f"POST {method}" if method.startswith("/v1/") else f"forwardplane.v1.GenerationService/{method}"
    given = carriers[0] if len(carriers) == 1 else ""
    parent = given if isinstance(given, str) else given.decode("latin-1")
    return SpanStart(name=name, kind=SpanKind.SERVER, parent=parent if len(parent) <= _MAX_HEADER_CHARS else "")


def _finish_reason(stream: CallerStream) -> str:
    return "error" if stream.finish is None else FinishReason(stream.finish.reason).name.lower()
