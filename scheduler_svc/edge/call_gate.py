"""How many calls the gRPC door of an edge serves at once, and the interceptor that counts them.

A call is counted before its message is read: one too many costs its headers and at most one flow-control window, and
is refused at once. Guards: whatever ends a call, it is counted no more.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import grpc

from protos.service.handlers import Context, Handler, answer_stream, handler_like
from protos.wire.errors import DeadlinePassed, InvalidRequest, QueueFull
from scheduler_svc.edge.metrics import EdgeMetrics, counting_rejections

RETRY_AFTER_MS = 1000
MESSAGE_LIMIT_S = 30.0
"""Until the one message of a call is there."""


class CallGate:
    """Made by the edge's server, used on its event loop."""

    def __init__(self, max_calls: int, *, what: str) -> None:
        """Let at most `max_calls` in at once; `what` names them in refusals."""
        self._max_calls = max_calls
        self._what = what
        self._inside = 0

    @property
    def inside(self) -> int:
        """Calls that were let in and have not ended."""
        return self._inside

    @contextmanager
    def entered(self, metrics: EdgeMetrics) -> Iterator[None]:
        """One call's time inside.

        Raises:
            QueueFull: as many as may be are inside.
        """
        with counting_rejections(metrics):
            if self._inside >= self._max_calls:
                message = f"this edge serves {self._max_calls} {self._what} at once, which is its limit"
                raise QueueFull(message, retry_after_ms=RETRY_AFTER_MS)
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1


class GateInterceptor(grpc.aio.ServerInterceptor):
    """Behind the status interceptor. Takes over the reading of the message, so that a call enters before it."""

    def __init__(
        self, gates: Mapping[str, CallGate], metrics: EdgeMetrics, *, message_limit_s: float = MESSAGE_LIMIT_S
    ) -> None:
        """Gates by the full name of the method, with slashes; other methods have none."""
        self._gates = gates
        self._metrics = metrics
        self._limit_s = message_limit_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The handler of this call behind its gate."""
        handler = cast(Any, await continuation(handler_call_details))
        gate = self._gates.get(handler_call_details.method)
        if handler is None or gate is None or handler.request_streaming:
            return cast(Handler, handler)
        if handler.response_streaming:
            behaviour = self._stream(handler.unary_stream, gate)
        else:
            behaviour = self._unary(handler.unary_unary, gate)
        return handler_like(handler, behaviour, deserializer=handler.request_deserializer, reads_stream=True)

    def _unary(self, behaviour: Callable[..., Any], gate: CallGate) -> Callable[..., Awaitable[Any]]:
        async def call(requests: AsyncIterator[Any], context: Context) -> Any:
            with gate.entered(self._metrics):
                return await behaviour(await self._message(requests), context)

        return call

    def _stream(self, behaviour: Callable[..., Any], gate: CallGate) -> Callable[..., Awaitable[None]]:
        async def call(requests: AsyncIterator[Any], context: Context) -> None:
            with gate.entered(self._metrics):
                await answer_stream(behaviour, await self._message(requests), context)

        return call

    async def _message(self, requests: AsyncIterator[Any]) -> Any:
        try:
            async with asyncio.timeout(self._limit_s):
                async for request in requests:
                    return request
        except TimeoutError:
            raise DeadlinePassed(f"the call's message did not arrive within {self._limit_s:g} s") from None
        raise InvalidRequest("the call has no message")
