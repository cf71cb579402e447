"""A caller's channel notices a scheduler that vanished without a word, and its pings are none that servers punish."""

import signal

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.service.channel import CALLER_PING_MS, caller_channel
from protos.service.server import LEAST_PING_INTERVAL_MS, PortProfile
from protos.service.status import from_rpc_error
from protos.wire.errors import ConnectionLost
from tests.support.health_process import health_process

SOON = (("grpc.keepalive_time_ms", 1000), ("grpc.keepalive_timeout_ms", 500), ("grpc.http2.ping_timeout_ms", 500))
"""The channel's own options in a time that a test can wait for."""


@pytest.fixture
def server():
    with health_process(PortProfile.CALLER, hardened=True) as (child, port):
        child.port = port
        yield child


def test_callers_ping_less_often_than_servers_punish():
    assert CALLER_PING_MS > LEAST_PING_INTERVAL_MS


async def test_a_scheduler_that_says_nothing_more_is_a_lost_connection(server):
    async with caller_channel(f"127.0.0.1:{server.port}", options=SOON) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        server.send_signal(signal.SIGSTOP)
        with pytest.raises(grpc.RpcError) as raised:
            await watch.read()

    assert type(from_rpc_error(raised.value)) is ConnectionLost
