"""A scheduler's side of WorkerService for tests: sends what it is told to, right or wrong, and reads the answers."""

import asyncio
import contextlib

import grpc

from protos.forwardplane.v1.worker_pb2 import (
    AttachRequest,
    ExecuteOpen,
    ExecuteRequest,
    PlanMessage,
    ReportRequest,
)
from protos.forwardplane.v1.worker_pb2_grpc import WorkerServiceStub
from protos.service.channel import plan_channel
from protos.service.status import from_rpc_error
from protos.wire.codec import checksum, decode_result, encode_plan, open_message, worker_info_from_proto
from protos.wire.errors import Loading
from tests.support.plans import INCARNATION

WAIT_S = 10


class WorkerClient:
    def __init__(self, port):
        self.channel = plan_channel(f"127.0.0.1:{port}")
        self.stub = WorkerServiceStub(self.channel)

    async def close(self):
        await self.channel.close()

    async def attach(self, epoch=7, term=3, *, protocol=(1, 1), name="test"):
        request = AttachRequest(
            epoch=epoch, term=term, protocol_min=protocol[0], protocol_max=protocol[1], scheduler_name=name
        )
        with raised_errors():
            return worker_info_from_proto(await self.stub.Attach(request, timeout=WAIT_S))

    async def attached(self, **fence):
        """As `attach`, once the worker has loaded."""
        while True:
            try:
                return await self.attach(**fence)
            except Loading:
                await asyncio.sleep(0.005)

    async def open(self, number=1, *, epoch=7, term=3, incarnation=INCARNATION):
        stream = Stream(self.stub.Execute())
        opening = ExecuteOpen(epoch=epoch, term=term, incarnation=incarnation, stream_number=number)
        await stream.write(ExecuteRequest(open=opening))
        reply = await stream.read()
        assert reply.HasField("opened"), reply
        return stream, reply.opened.expected_seq

    def report(self, interval_ms=20):
        return self.stub.Report(ReportRequest(interval_ms=interval_ms))


class Stream:
    def __init__(self, call):
        self.call = call

    async def write(self, request):
        with raised_errors(), contextlib.suppress(asyncio.InvalidStateError):
            await self.call.write(request)

    async def send(self, plan):
        body = encode_plan(plan)
        await self.send_bytes(body, checksum(body))

    async def send_bytes(self, body, crc32):
        await self.write(ExecuteRequest(plan=PlanMessage(body=body, crc32=crc32)))

    async def read(self):
        """The next reply, or the end: raises the error that it carries."""
        with raised_errors():
            async with asyncio.timeout(WAIT_S):
                return await self.call.read()

    async def result(self):
        reply = await self.read()
        assert reply.HasField("result"), reply
        return decode_result(open_message(reply.result.body, reply.result.crc32))

    async def run(self, plan):
        await self.send(plan)
        return await self.result()


@contextlib.contextmanager
def raised_errors():
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
