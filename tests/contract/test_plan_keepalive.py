"""The plan channel notices a worker that stands still or is gone: measured, since gRPC's own default is a minute."""

import signal
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.service.channel import plan_channel
from protos.service.server import PortProfile
from protos.service.status import from_rpc_error
from protos.wire.errors import ConnectionLost
from tests.support.health_process import health_process

NOTICED_WITHIN_S = 5.0


@pytest.fixture
def server():
    with health_process(PortProfile.PLAN) as (child, port):
        child.port = port
        yield child


async def test_a_stopped_worker_is_noticed_within_seconds(server):
    async with plan_channel(f"127.0.0.1:{server.port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        server.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as raised:
            await watch.read()
        took_s = time.monotonic() - began

    assert type(from_rpc_error(raised.value)) is ConnectionLost
    assert took_s < NOTICED_WITHIN_S


async def write_on(call, message):
    """Until a write fails: a busy machine may take a while to see that the peer is gone."""
    for _ in range(100):
        time.sleep(0.02)  # the loop stands still, so the call has no status yet
        await call.write(message)


async def test_a_write_to_a_worker_that_has_just_gone_is_a_lost_connection(server):
    """Before the status is in, gRPC calls it an internal error, for the reader too."""
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    async with plan_channel(f"127.0.0.1:{server.port}") as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(asked)
        await call.read()
        server.kill()
        server.wait()
        with pytest.raises(grpc.RpcError) as written:
            await write_on(call, asked)
        with pytest.raises(grpc.RpcError) as read:
            await call.read()

    assert [type(from_rpc_error(raised.value)) for raised in (written, read)] == [ConnectionLost, ConnectionLost]
