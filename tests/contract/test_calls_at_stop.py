"""Calls that come in while a server stops: their callers hear that the server is gone, and may ask elsewhere."""

import asyncio

import grpc
import pytest

from protos.service.status import from_rpc_error
from protos.wire.errors import UnavailableError


class _Echo(grpc.GenericRpcHandler):
    def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def behaviour(request: bytes, _context: grpc.aio.ServicerContext):
            yield request

        return grpc.unary_stream_rpc_method_handler(behaviour)


@pytest.mark.parametrize("grace_s", [0, 0.2])
async def test_no_call_at_a_stop_is_told_that_it_was_cancelled(grace_s):
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    failed: list[grpc.aio.AioRpcError] = []

    async def call(channel: grpc.aio.Channel) -> None:
        try:
            async for _ in channel.unary_stream("/test/Echo")(b"x"):
                pass
        except grpc.aio.AioRpcError as error:
            failed.append(error)

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        calls = []
        for number in range(200):  # a few of them arrive between the server's last look and its end
            calls.append(asyncio.create_task(call(channel)))
            await asyncio.sleep(0.001)
            if number == 100:
                stopping = asyncio.create_task(server.stop(grace_s))
        await asyncio.gather(stopping, *calls)

    assert failed
    assert [error for error in map(from_rpc_error, failed) if not isinstance(error, UnavailableError)] == []
