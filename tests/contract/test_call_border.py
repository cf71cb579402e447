import asyncio
import logging
from contextlib import asynccontextmanager

import grpc
import pytest

from protos.service.channel import caller_channel, sync_caller_channel
from protos.service.server import ServerOptions, bind_port, build_server
from protos.service.status import StatusInterceptor, abort_with, from_rpc_error
from protos.wire import errors
from tests.support.waiting import until


class Recorder:
    def __init__(self):
        self.events = []

    def call_started(self, method):
        self.events.append(("started", method))

    def call_finished(self, method, code, *, seconds):
        assert seconds >= 0
        self.events.append((method, code))


class Service:
    """Methods by name; each shows one way to end."""

    def __init__(self):
        self.closed = asyncio.Event()

    async def echo(self, request, context):
        return request

    async def full(self, request, context):
        raise errors.QueueFull("queue is full", retry_after_ms=20)

    async def bug(self, request, context):
        return {}[request]

    async def aborts(self, request, context):
        await context.abort(grpc.StatusCode.NOT_FOUND, "by hand")

    async def aborts_with(self, request, context):
        await abort_with(context, errors.NeverFits("too long", field="prompt"))

    async def stream(self, request, context):
        try:
            for _ in range(3):
                yield request
            if request == b"fail":
                raise errors.DeviceFault("gone")
            if request == b"wait":
                await asyncio.Event().wait()
        finally:
            self.closed.set()

    async def stream_by_writes(self, request, context):
        await context.write(request)
        raise errors.Draining("closing")

    async def both(self, request_iterator, context):
        async for message in request_iterator:
            if message == b"bug":
                raise ZeroDivisionError
            yield message


def handlers(service):
    unary = ("echo", "full", "bug", "aborts", "aborts_with")
    streams = ("stream", "stream_by_writes")
    found = {name: grpc.unary_unary_rpc_method_handler(getattr(service, name)) for name in unary}
    found |= {name: grpc.unary_stream_rpc_method_handler(getattr(service, name)) for name in streams}
    found["both"] = grpc.stream_stream_rpc_method_handler(service.both)
    return grpc.method_handlers_generic_handler("test.Service", found)


@asynccontextmanager
async def served():
    recorder, service = Recorder(), Service()
    server = build_server(options=ServerOptions(), interceptors=[StatusInterceptor([recorder])])
    server.add_generic_rpc_handlers([handlers(service)])
    port = bind_port(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with caller_channel(f"127.0.0.1:{port}") as channel:
            channel.recorder, channel.service, channel.port = recorder, service, port
            yield channel
    finally:
        await server.stop(None)


async def unary(channel, name, body=b"x"):
    try:
        return await channel.unary_unary(f"/test.Service/{name}")(body)
    except grpc.RpcError as error:
        return from_rpc_error(error)


async def read_all(call):
    received = []
    try:
        async for message in call:
            received.append(message)
    except grpc.RpcError as error:
        return received, from_rpc_error(error)
    return received, None


async def test_unary_calls_end_with_the_class_that_was_raised(caplog):
    async with served() as channel:
        echo, full = await unary(channel, "echo"), await unary(channel, "full")
        by_hand, with_ours = await unary(channel, "aborts"), await unary(channel, "aborts_with")
        absent = await unary(channel, "absent")

        assert echo == b"x"
        assert (type(full), full.retry_after_ms) == (errors.QueueFull, 20)
        assert (type(by_hand), by_hand.message) == (errors.CallerError, "by hand")
        assert (type(with_ours), with_ours.field) == (errors.NeverFits, "prompt")
        assert type(absent) is errors.NotOffered
        assert [event for event in channel.recorder.events if event[0] != "started"] == [
            ("/test.Service/echo", "OK"),
            ("/test.Service/full", "RESOURCE_EXHAUSTED"),
            ("/test.Service/aborts", "NOT_FOUND"),
            ("/test.Service/aborts_with", "FAILED_PRECONDITION"),
        ]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_bug_is_logged_once_and_named_by_its_id(caplog):
    async with served() as channel:
        error = await unary(channel, "bug", b"private words")

        assert type(error) is errors.InternalFault
        assert "private" not in error.message
        logged = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert [record.error_id for record in logged] == [error.error_id]
        # The caller may have its status before the call has ended here.
        await until(lambda: channel.recorder.events[-1] == ("/test.Service/bug", "INTERNAL"))


async def test_streams_keep_what_was_sent_before_the_error():
    async with served() as channel:
        stream = channel.unary_stream("/test.Service/stream")
        good = await read_all(stream(b"a"))
        failed = await read_all(stream(b"fail"))
        by_writes = await read_all(channel.unary_stream("/test.Service/stream_by_writes")(b"b"))

    assert good == ([b"a"] * 3, None)
    assert (failed[0], type(failed[1])) == ([b"fail"] * 3, errors.DeviceFault)
    assert (by_writes[0], type(by_writes[1])) == ([b"b"], errors.Draining)


async def test_a_bidirectional_stream_is_guarded_too():
    async with served() as channel:
        received, error = await read_all(channel.stream_stream("/test.Service/both")(iter([b"one", b"bug"])))

    assert received == [b"one"]
    assert type(error) is errors.InternalFault


@pytest.mark.parametrize("timeout", [None, 60])
async def test_a_caller_that_leaves_cancels_the_handler_and_counts_as_cancelled(timeout):
    async with served() as channel:
        call = channel.unary_stream("/test.Service/stream")(b"wait", timeout=timeout)
        await call.read()
        call.cancel()
        await asyncio.wait_for(channel.service.closed.wait(), 30)
        await until(lambda: channel.recorder.events[-1][0] != "started")

        assert channel.recorder.events[-1] == ("/test.Service/stream", "CANCELLED")


async def test_a_passed_deadline_ends_both_sides():
    async with served() as channel:
        _, error = await read_all(channel.unary_stream("/test.Service/stream")(b"wait", timeout=0.1))
        await asyncio.wait_for(channel.service.closed.wait(), 30)
        await until(lambda: channel.recorder.events[-1][0] != "started")

        assert type(error) is errors.DeadlinePassed
        assert channel.recorder.events[-1] == ("/test.Service/stream", "DEADLINE_EXCEEDED")


async def test_the_blocking_client_sees_the_same_classes():
    async with served() as channel:

        def ask():
            with sync_caller_channel(f"127.0.0.1:{channel.port}") as blocking, pytest.raises(grpc.RpcError) as raised:
                blocking.unary_unary("/test.Service/full")(b"x", timeout=5)
            return from_rpc_error(raised.value)

        error = await asyncio.to_thread(ask)

    assert (type(error), error.retry_after_ms) == (errors.QueueFull, 20)


async def test_a_message_over_the_cap_is_refused_without_reaching_the_handler():
    async with served() as channel:
        error = await unary(channel, "echo", bytes((4 << 20) + 1))

        assert type(error) is errors.MessageTooLarge
        assert await unary(channel, "echo") == b"x"


async def test_a_compressed_message_is_refused():
    async with served() as channel:
        call = channel.unary_unary("/test.Service/echo")(bytes(5000), compression=grpc.Compression.Gzip)
        with pytest.raises(grpc.RpcError) as raised:
            await call

    assert type(from_rpc_error(raised.value)) is errors.NotOffered
