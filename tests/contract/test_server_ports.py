import asyncio
import socket
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.service.channel import caller_channel, only_serving_options, plan_channel, sync_caller_channel
from protos.service.server import (
    HealthServer,
    PortProfile,
    ServerOptions,
    add_reflection,
    address,
    bind_port,
    build_server,
    prove_port_free,
)
from protos.service.status import from_rpc_error
from protos.wire import errors
from protos.wire.errors import CannotListen, PortInUse

NAME = "forwardplane.v1.GenerationService"
STATES = health_pb2.HealthCheckResponse


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


@asynccontextmanager
async def healthy(names=(NAME,)):
    server = HealthServer(names)
    port = await server.start("127.0.0.1", 0)
    try:
        async with caller_channel(f"127.0.0.1:{port}") as channel:
            yield server, health_pb2_grpc.HealthStub(channel)
    finally:
        await server.stop()


async def check(stub, name):
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status


@pytest.mark.parametrize("profile", PortProfile)
async def test_a_port_in_use_is_named(profile, taken_port, capfd):
    server = build_server(options=ServerOptions(profile=profile))

    with pytest.raises(PortInUse, match=f"port {taken_port} is in use on 127.0.0.1") as raised:
        bind_port(server, "127.0.0.1", taken_port)

    assert raised.value.field == "port"
    assert capfd.readouterr() == ("", "")
    await server.stop(None)


@pytest.mark.parametrize(("host", "field"), [("192.0.2.1", "port"), ("no such host.invalid", "host")])
def test_an_address_that_is_not_ours_is_refused(host, field):
    with pytest.raises(CannotListen) as raised:
        prove_port_free(host, 0)

    assert type(raised.value) is CannotListen
    assert raised.value.field == field


async def test_two_servers_do_not_share_a_port_unless_told():
    first, second = (build_server(options=ServerOptions()) for _ in range(2))
    port = bind_port(first, "127.0.0.1", 0)

    with pytest.raises(PortInUse):
        bind_port(second, "127.0.0.1", port)

    await first.stop(None)
    await second.stop(None)


async def test_edges_may_share_a_port():
    servers = [build_server(options=ServerOptions(shares_port=True)) for _ in range(2)]
    port = bind_port(servers[0], "127.0.0.1", 0, shares_port=True)

    assert bind_port(servers[1], "127.0.0.1", port, shares_port=True) == port

    for server in servers:
        await server.stop(None)


def test_an_address_of_version_6_has_brackets():
    assert address("::1", 5) == "[::1]:5"
    assert address("h", 5) == "h:5"


async def test_health_by_name_follows_what_is_set():
    async with healthy() as (server, stub):
        before = await check(stub, ""), await check(stub, NAME)
        await server.set_serving(NAME, is_serving=True)
        serving = await check(stub, NAME)
        await server.drain()
        await server.set_serving(NAME, is_serving=True)
        drained = await check(stub, ""), await check(stub, NAME)
        with pytest.raises(grpc.RpcError) as unknown:
            await check(stub, "nobody")

    assert before == (STATES.SERVING, STATES.NOT_SERVING)
    assert serving == STATES.SERVING
    assert drained == (STATES.NOT_SERVING, STATES.NOT_SERVING)
    assert type(from_rpc_error(unknown.value)) is errors.CallerError


async def test_watchers_see_every_state_and_stay_connected_when_another_leaves():
    async with healthy() as (server, stub):
        request = health_pb2.HealthCheckRequest(service=NAME)
        first, second = stub.Watch(request), stub.Watch(request)
        seen = [(await first.read()).status, (await second.read()).status]
        first.cancel()
        await asyncio.sleep(0.02)
        await server.set_serving(NAME, is_serving=True)
        seen.append((await asyncio.wait_for(second.read(), 30)).status)
        second.cancel()

    assert seen == [STATES.NOT_SERVING, STATES.NOT_SERVING, STATES.SERVING]


async def test_an_unknown_name_can_be_watched():
    async with healthy() as (_, stub):
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="later"))

        assert (await watch.read()).status == STATES.SERVICE_UNKNOWN
        assert not watch.done()
        watch.cancel()


async def test_stopping_does_not_wait_for_watchers():
    async with healthy() as (server, stub):
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        async with asyncio.timeout(30):  # the watch would stay open for good
            await server.stop()
        with pytest.raises(grpc.RpcError):
            await watch.read()


async def test_health_is_on_the_main_port_too_and_reflection_lists_all():
    health = HealthServer((NAME,))
    server = build_server(options=ServerOptions())
    health.add_to(server)
    add_reflection(server, (NAME,))
    port = bind_port(server, "127.0.0.1", 0)
    await server.start()
    async with caller_channel(f"127.0.0.1:{port}") as channel:
        alive = await check(health_pb2_grpc.HealthStub(channel), "")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        async for answer in call:
            listed = {service.name for service in answer.list_services_response.service}
    await server.stop(None)

    assert alive == STATES.SERVING
    assert {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= listed


@pytest.mark.parametrize("channel_to", [caller_channel, plan_channel])
async def test_nobody_there_says_so_in_one_line(channel_to):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        target = f"127.0.0.1:{taken.getsockname()[1]}"
    async with channel_to(target) as channel:
        with pytest.raises(grpc.RpcError) as raised:
            await channel.unary_unary("/a/b")(b"", timeout=5)

    error = from_rpc_error(raised.value, target=target)
    assert (type(error), error.message) == (errors.NoServer, f"no server answers at {target}")


async def test_the_plan_channel_reconnects_by_itself_and_soon():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with plan_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError):
            await check(stub, "")
        server = HealthServer(())
        await server.start("127.0.0.1", port)
        # A second or so by the channel's own settings; a caller's channel without them may pause for two minutes.
        answer = await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=30)
        await server.stop()

    assert answer.status == STATES.SERVING


async def test_a_plan_of_eight_mebibytes_passes_only_through_plan_ports():
    async def echo(request, context):
        return request

    body = bytes(7 << 20)
    handler = grpc.method_handlers_generic_handler("t.S", {"echo": grpc.unary_unary_rpc_method_handler(echo)})
    outcomes = []
    for profile, channel_to in ((PortProfile.PLAN, plan_channel), (PortProfile.CALLER, plan_channel)):
        server = build_server(options=ServerOptions(profile=profile))
        server.add_generic_rpc_handlers([handler])
        port = bind_port(server, "127.0.0.1", 0)
        await server.start()
        async with channel_to(f"127.0.0.1:{port}") as channel:
            try:
                outcomes.append(len(await channel.unary_unary("/t.S/echo")(body)))
            except grpc.RpcError as error:
                outcomes.append(type(from_rpc_error(error)))
        await server.stop(None)

    assert outcomes == [7 << 20, errors.MessageTooLarge]


@asynccontextmanager
async def scheduler_like(*, is_serving):
    """A callers' port with health, as an edge has; says who it is by its reflected name."""
    health = HealthServer((NAME,))
    await health.start("127.0.0.1", 0)
    server = build_server(options=ServerOptions())
    health.add_to(server)
    port = bind_port(server, "127.0.0.1", 0)
    await server.start()
    await health.set_serving(NAME, is_serving=is_serving)
    try:
        yield health, port
    finally:
        await server.stop(None)
        await health.stop()


@asynccontextmanager
async def two_schedulers():
    """The one that waits, the one that serves, and both as one target."""
    first_one, second_one = scheduler_like(is_serving=False), scheduler_like(is_serving=True)
    async with first_one as (waiting, first), second_one as (serving, second):
        yield waiting, serving, f"ipv4:127.0.0.1:{first},127.0.0.1:{second}"


ASKED = health_pb2.HealthCheckRequest(service=NAME)
PATIENT = {"timeout": 5, "wait_for_ready": True}


async def test_of_several_addresses_only_one_that_serves_is_called():
    async with two_schedulers() as (waiting, serving, target):
        channel = caller_channel(target, options=only_serving_options(NAME))
        stub = health_pb2_grpc.HealthStub(channel)

        async def all_serve():
            return {(await stub.Check(ASKED, **PATIENT)).status for _ in range(8)} == {STATES.SERVING}

        assert await all_serve()
        await serving.set_serving(NAME, is_serving=False)
        await waiting.set_serving(NAME, is_serving=True)
        async with asyncio.timeout(30):
            while not await all_serve():
                await asyncio.sleep(0.01)
        await channel.close()


async def test_a_blocking_caller_calls_only_one_that_serves():
    async with two_schedulers() as (_, _, target):
        with sync_caller_channel(target, options=only_serving_options(NAME)) as channel:
            check_one = health_pb2_grpc.HealthStub(channel).Check
            answers = [await asyncio.to_thread(check_one, ASKED, **PATIENT) for _ in range(8)]

    assert {answer.status for answer in answers} == {STATES.SERVING}
