"""What is too many or too much for an edge is refused in its own words, with a hint, before it costs anything."""

import asyncio
from collections import Counter
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from protos.client.generation_client import AsyncGenerationClient
from protos.forwardplane.v1 import generate_pb2 as pb
from protos.forwardplane.v1.generate_pb2_grpc import (
    GenerationServiceServicer,
    GenerationServiceStub,
    add_GenerationServiceServicer_to_server,
)
from protos.service.channel import caller_channel
from protos.service.server import ServerOptions, bind_port, build_server
from protos.service.status import StatusInterceptor, from_rpc_error
from protos.wire import errors
from protos.wire.limits import MAX_CALLER_MESSAGE_BYTES
from scheduler_svc.edge.call_gate import CallGate, GateInterceptor
from scheduler_svc.edge.metrics import create_edge_metrics
from tests.support.edge_harness import Edge, running_edge
from tests.support.waiting import until

GENERATE, ABORT = (f"/forwardplane.v1.GenerationService/{name}" for name in ("Generate", "Abort"))
CONNECTIONS, CALLS = 2, 3_100
"""More than gRPC lets wait by itself: from 1,000 on it cancels by chance, from 3,000 on always."""


async def end_of(call) -> errors.EngineError | None:
    try:
        await call.read()
    except grpc.RpcError as error:
        return from_rpc_error(error)
    return None


async def test_every_call_too_many_is_refused_with_a_hint(tmp_path: Path) -> None:
    async with running_edge(tmp_path, max_streams=20, is_silent=True) as edge:
        channels = [caller_channel(f"127.0.0.1:{edge.server.port}") for _ in range(CONNECTIONS)]
        stubs = [GenerationServiceStub(channel) for channel in channels]
        calls = [stubs[index % CONNECTIONS].Generate(pb.GenerateRequest(text="a")) for index in range(CALLS)]
        reads = [asyncio.create_task(end_of(call)) for call in calls]
        await until(lambda: sum(read.done() for read in reads) == CALLS - 20, timeout_s=60)
        ends = Counter((type(read.result()), read.result().retry_after_ms) for read in reads if read.done())
        assert ends == {(errors.QueueFull, 1000): CALLS - 20}
        assert len(edge.core.submits) == 20
        assert edge.metric("request_rejections_total", reason="QUEUE_FULL") == CALLS - 20
        for call in calls:
            call.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        await until(lambda: edge.link.num_streams == 0, timeout_s=30)
        for channel in channels:
            await channel.close()


def unsent(edge: Edge):
    """A call whose message does not come."""
    return edge.channel.stream_stream(GENERATE)()


async def test_a_call_too_many_is_refused_before_its_message_is_there(tmp_path: Path) -> None:
    async with running_edge(tmp_path, max_streams=1, is_silent=True) as edge:
        held = edge.stub.Generate(pb.GenerateRequest(text="a"))
        await until(lambda: edge.core.submits, timeout_s=30)
        error = await end_of(unsent(edge))
        assert isinstance(error, errors.QueueFull)
        reply = await edge.stub.GetModel(pb.GetModelRequest())
        assert reply.name == "tiny"
        held.cancel()
        await until(lambda: edge.link.num_streams == 0, timeout_s=30)


class Echo(GenerationServiceServicer):
    async def Abort(self, request, context):  # noqa: N802 - the name is gRPC's
        return pb.AbortReply()


async def test_a_message_that_does_not_come_holds_no_place_for_long() -> None:
    metrics = create_edge_metrics(CollectorRegistry())
    gate = CallGate(1, what="calls")
    interceptor = GateInterceptor({ABORT: gate}, metrics, message_limit_s=0.05)
    server = build_server(options=ServerOptions(), interceptors=[StatusInterceptor(), interceptor])
    add_GenerationServiceServicer_to_server(Echo(), server)
    port = bind_port(server, "127.0.0.1", 0)
    await server.start()
    async with caller_channel(f"127.0.0.1:{port}") as channel:
        error = await end_of(channel.stream_stream(ABORT)())
        assert isinstance(error, errors.DeadlinePassed)
        assert gate.inside == 0
        await GenerationServiceStub(channel).Abort(pb.AbortRequest())
    await server.stop(None)


async def test_a_call_that_ends_without_a_message_is_refused(tmp_path: Path) -> None:
    async with running_edge(tmp_path) as edge:
        call = edge.channel.stream_stream(GENERATE)()
        await call.done_writing()
        error = await end_of(call)
        assert (type(error), error.message) == (errors.InvalidRequest, "the call has no message")


@pytest.mark.parametrize("method", ["Generate", "GenerateOnce", "Embed", "Tokenize", "Detokenize", "Abort"])
async def test_a_message_over_the_limit_is_refused_by_both_numbers(tmp_path: Path, method: str) -> None:
    size = MAX_CALLER_MESSAGE_BYTES + 1
    async with running_edge(tmp_path) as edge:
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{edge.server.port}", options=options) as channel:
            # Any bytes: they are counted before they are read.
            path = f"/forwardplane.v1.GenerationService/{method}"
            error = await end_of(channel.unary_stream(path)(bytes(size)))
    assert type(error) is errors.MessageTooLarge
    assert error.message == f"the request has {size} bytes; the limit is {MAX_CALLER_MESSAGE_BYTES}"


async def test_the_client_names_the_field_that_is_too_large_and_sends_nothing() -> None:
    text = "é" * (MAX_CALLER_MESSAGE_BYTES // 2)
    async with AsyncGenerationClient("127.0.0.1:1") as client:
        with pytest.raises(errors.MessageTooLarge, match="most of them in text; the limit is 4194304") as caught:
            await client.tokenize(text)
        assert caught.value.field == "text"
        with pytest.raises(errors.MessageTooLarge) as caught:
            await client.generate(["short", text])
        assert caught.value.field == "requests[1].text"


@pytest.mark.parametrize("method", ["Generate", "GenerateOnce", "Abort"])
async def test_bytes_that_are_no_message_are_the_callers_fault(tmp_path: Path, method: str) -> None:
    async with running_edge(tmp_path) as edge, caller_channel(f"127.0.0.1:{edge.server.port}") as channel:
        make = channel.unary_stream if method == "Generate" else channel.unary_unary
        call = make(f"/forwardplane.v1.GenerationService/{method}")(b"\xff" * 50)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
