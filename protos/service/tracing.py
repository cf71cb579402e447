"""Traces as the services see them: spans that begin, are given attributes, and end. Names no tracing library.

Off unless settings name an endpoint; only then is `otel_tracing` loaded, by name, and its package needed. Off is
`None`: who traces asks for that once and does nothing else. Attributes never hold what was asked or answered.
"""

import asyncio
import importlib.util
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Protocol

from pydantic import Field

from protos.service.lifecycle import Part
from protos.wire.errors import InvalidRequest

Attribute = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Attribute]

_LIBRARY = "opentelemetry.sdk"
_EXPORTER = "opentelemetry.exporter.otlp"
_IMPLEMENTATION = "protos.service.otel_tracing:exporting"
NO_PARENT = ""
_CLOSE_S = 3.0
_STOP_LIMIT_S = 8.0


class SpanKind(StrEnum):
    """Which side of a call a span is."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanStart:
    """What a span begins with."""

    name: str
    kind: SpanKind = SpanKind.INTERNAL
    parent: str = NO_PARENT
    """W3C traceparent of the span it belongs to; empty or broken: a trace of its own begins."""
    begin_ns: int | None = None
    """Since 1970; None: now."""
    links: tuple[str, ...] = ()
    """Traceparents of further spans that it serves."""


class OpenSpan(Protocol):
    """One span, until its end."""

    @property
    def traceparent(self) -> str:
        """To hand on; empty when nobody records this trace, so that nobody further on does either."""
        ...

    def add(self, attributes: Attributes) -> None:
        """More attributes."""
        ...

    def end(self, *, error: str = "", end_ns: int | None = None) -> None:
        """The span is over. `error`: stable name of what went wrong."""
        ...


class Tracing(Protocol):
    """The traces of one process. Made by its composition root, closed at its end."""

    def begin(self, start: SpanStart, attributes: Attributes) -> OpenSpan:
        """A span."""
        ...

    def close(self, timeout_s: float) -> None:
        """Send what is left. Blocks, at most so long."""
        ...


TraceEndpoint = Annotated[
    str | None,
    Field(
        pattern=r"^https?://[^/\s]+:\d+/?$",
        description="http://HOST:PORT of an OTLP receiver (gRPC) that gets traces; needs forwardplane[tracing]. "
        "Default: no traces.",
    ),
]
"""The setting of every process that has spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """Where spans go, and of which calls."""

    endpoint: str | None
    """`http://HOST:PORT` of an OTLP receiver over gRPC, or https; None: off."""
    ratio: float = 1.0
    """Share of the calls that are recorded, of those whose caller did not decide."""


def open_tracing(settings: TraceSettings, *, service: str) -> Tracing | None:
    """The process's traces; None: they are off.

    Raises:
        InvalidRequest: the optional package is not there.
    """
    if settings.endpoint is None:
        return None
    if not _is_installed(_LIBRARY) or not _is_installed(_EXPORTER):
        message = "trace_endpoint needs an optional package: pip install 'forwardplane[tracing]'"
        raise InvalidRequest(message, field="trace_endpoint")
    tracing: Tracing = pkgutil.resolve_name(_IMPLEMENTATION)(settings, service=service)
    return tracing


def tracing_part(tracing: Tracing) -> Part:
    """Sends what is left at the process's stop. Goes before the parts that trace, so that it stops behind them."""

    async def start() -> None:
        pass

    async def stop() -> None:
        await asyncio.to_thread(tracing.close, _CLOSE_S)

    return Part(name="traces", start=start, stop=stop, stop_limit_s=_STOP_LIMIT_S)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package above it
        return False
