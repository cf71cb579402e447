"""Bytes that are no message end a call with a status of ours, and leave no stack in the log."""

import logging

import grpc
import pytest

from protos.client.generation_client import AsyncGenerationClient
from protos.forwardplane.v1 import generate_pb2, generate_pb2_grpc, worker_pb2, worker_pb2_grpc
from protos.service.channel import caller_channel
from protos.service.server import ServerOptions, bind_port, build_server
from protos.service.status import StatusInterceptor, from_rpc_error
from protos.wire.errors import DataFault, InvalidRequest

BROKEN = b"\xff" * 50


class Generation(generate_pb2_grpc.GenerationServiceServicer):
    async def Abort(self, request, context):  # noqa: N802 - the name is gRPC's
        return generate_pb2.AbortReply()

    async def Generate(self, request, context):  # noqa: N802 - the name is gRPC's
        yield generate_pb2.GenerateChunk(request_id="a")


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    async def Execute(self, requests, context):  # noqa: N802 - the name is gRPC's
        async for _ in requests:
            yield worker_pb2.ExecuteReply(opened=worker_pb2.Opened(expected_seq=1))


@pytest.fixture
async def port():
    server = build_server(options=ServerOptions(), interceptors=(StatusInterceptor(),))
    generate_pb2_grpc.add_GenerationServiceServicer_to_server(Generation(), server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Worker(), server)
    bound = bind_port(server, "127.0.0.1", 0)
    await server.start()
    yield bound
    await server.stop(None)


async def unary(channel):
    await channel.unary_unary("/forwardplane.v1.GenerationService/Abort")(BROKEN)


async def streamed(channel):
    return [message async for message in channel.unary_stream("/forwardplane.v1.GenerationService/Generate")(BROKEN)]


@pytest.mark.parametrize("call", [unary, streamed])
async def test_a_request_of_garbage_is_an_invalid_argument(port, caplog, call):
    with caplog.at_level(logging.ERROR):
        async with caller_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.RpcError) as caught:
                await call(channel)
    assert isinstance(from_rpc_error(caught.value), InvalidRequest)
    assert caplog.records == []


async def test_a_request_that_can_be_read_reaches_its_handler(port):
    async with AsyncGenerationClient(f"127.0.0.1:{port}") as client:
        await client.abort("x")


async def test_garbage_within_a_stream_is_data_loss_behind_what_was_answered(port, caplog):
    opening = worker_pb2.ExecuteRequest(open=worker_pb2.ExecuteOpen()).SerializeToString()
    with caplog.at_level(logging.ERROR):
        async with caller_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream("/forwardplane.v1.WorkerService/Execute")()
            await call.write(opening)
            assert worker_pb2.ExecuteReply.FromString(await call.read()).opened.expected_seq == 1
            await call.write(BROKEN)
            with pytest.raises(grpc.RpcError) as caught:
                await call.read()
    assert isinstance(from_rpc_error(caught.value), DataFault)
    assert caplog.records == []
