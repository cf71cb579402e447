"""Handlers of asyncio gRPC servers as interceptors take them apart and put them together. Knows no service."""

import inspect
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias, cast

import grpc

from protos.wire.errors import ConnectionLost

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Around: TypeAlias = Callable[[Context, Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""What an interceptor does with a call: it awaits the call's answer once, or does not, and gives it back."""


def async_behaviour(handler: Any) -> Callable[..., Any] | None:
    """The handler's function if it is asynchronous."""
    if handler is None:
        return None
    found = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    is_async = inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found)
    return cast(Callable[..., Any], found) if is_async else None


def handler_like(
    handler: Any, behaviour: Callable[..., Any], *, deserializer: Callable[..., Any] | None, reads_stream: bool = False
) -> Handler:
    """A handler of the same kind that does `behaviour`, which gets its one request as a stream if `reads_stream`."""
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming or reads_stream, handler.response_streaming]
    return cast(Handler, cast(Any, make)(behaviour, deserializer, handler.response_serializer))


def surrounded(
    handler: Any,
    behaviour: Callable[..., Any],
    around: Around,
    *,
    deserializer: Callable[..., Any] | None,
    check: Callable[[Any], Any] | None = None,
) -> Handler:
    """A handler of the same kind that does `behaviour` inside `around`, and `check` of its request first, if any."""
    answers = partial(answer_stream, behaviour) if handler.response_streaming else behaviour

    async def call(request: Any, context: Context) -> Any:
        def answer() -> Awaitable[Any]:
            return cast("Awaitable[Any]", answers(request if check is None else check(request), context))

        return await around(context, answer)

    return handler_like(handler, call, deserializer=deserializer)


async def answer_stream(behaviour: Callable[..., Any], request: Any, context: Context) -> None:
    """Run a behaviour that answers with a stream: a generator, or one that writes itself.

    Raises:
        ConnectionLost: the peer went while something was written, before gRPC had told the handler.
    """
    made = behaviour(request, context)
    if inspect.isasyncgen(made):
        await _write_all(made, context)
    else:
        await made


async def _write_all(messages: Any, context: Context) -> None:
    """Send what an asynchronous generator makes, and close it."""
    async with aclosing(messages):
        async for message in messages:
            try:
                await context.write(message)
            except grpc.aio.InternalError as error:
                raise ConnectionLost("the peer is gone: nothing can be written") from error
