"""S2 at a worker's port over mutual TLS: each method with no, a foreign, an ended and another role's certificate."""

import contextlib

import grpc
import pytest

from protos.service.access import METHOD_ROLES, Role
from protos.service.channel import plan_channel
from protos.service.credentials import ChannelSecurity
from protos.service.security_config import TlsConfig
from tests.support.certificates import Authority, security_of
from tests.support.fake_executor import FakeExecutor
from tests.support.plans import make_info
from tests.support.running_worker import running_service
from worker_svc.config import ObservabilityConfig, ServerConfig
from worker_svc.rpc.listeners import Listeners
from worker_svc.rpc.service import WorkerService

WORKER = "worker.forwardplane"
WAIT_S = 5
REFUSED = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE}
METHODS = sorted(METHOD_ROLES)


@contextlib.asynccontextmanager
async def worker_port(folder, **options):
    server = ServerConfig(port=0, health_port=0)
    listeners = Listeners(server, ObservabilityConfig(metrics_port=0), TlsConfig(tls_dir=folder, **options))
    service = WorkerService(lambda: FakeExecutor(make_info()), listeners, server)
    async with running_service(service):
        yield service.listeners.port


async def code_of(channel, method):
    """The code that a call without a message ends with; OK for one that is answered."""
    call = channel.stream_stream(method)(iter([b""]), timeout=WAIT_S)
    try:
        await call.read()
    except grpc.RpcError as error:
        return error.code()
    finally:
        call.cancel()
    return grpc.StatusCode.OK if not call.done() else await call.code()


@pytest.fixture(scope="module")
def authority():
    return Authority.new()


def stranger(authority, tmp_path, kind):
    """How somebody who is no scheduler of ours comes to the port."""
    if kind == "no certificate":
        return ChannelSecurity(
            credentials=grpc.ssl_channel_credentials((authority.role(tmp_path, "caller") / "ca.crt").read_bytes()),
            server_name=WORKER,
        )
    if kind == "plain text":
        return None
    trusted = (authority.role(tmp_path, "worker") / "ca.crt").read_bytes()
    if kind == "another authority":
        folder = Authority.new().role(tmp_path, "scheduler")
    elif kind == "ended":
        folder = authority.role(tmp_path, "scheduler", begins_s=-60, valid_s=-1)
    elif kind == "another domain":
        folder = authority.write(tmp_path / "domain", uris=("spiffe://elsewhere/scheduler",))
    else:
        folder = authority.role(tmp_path, kind)
    credentials = grpc.ssl_channel_credentials(
        trusted, (folder / "tls.key").read_bytes(), (folder / "tls.crt").read_bytes()
    )
    return ChannelSecurity(credentials=credentials, server_name=WORKER)


STRANGERS = [
    "no certificate",
    "plain text",
    "another authority",
    "ended",
    "another domain",
    "worker",
    "operator",
    "caller/alice",
]


@pytest.mark.parametrize("kind", STRANGERS)
async def test_s2_nobody_but_a_scheduler_reaches_any_method(authority, tmp_path, kind):
    async with worker_port(authority.role(tmp_path, "worker")) as port:
        channel = plan_channel(f"127.0.0.1:{port}", stranger(authority, tmp_path, kind))
        try:
            codes = {method: await code_of(channel, method) for method in METHODS if "Generation" not in method}
        finally:
            await channel.close()
        may = {Role(kind)} if kind in ("operator",) else set()
        wanted = [method for method, roles in METHOD_ROLES.items() if method in codes and not roles & may]
        assert {codes[method] for method in wanted} <= REFUSED, codes
        assert all(codes[method] in REFUSED for method in codes if "WorkerService" in method)


async def test_the_scheduler_reaches_every_method_and_nothing_that_is_not_in_the_table(authority, tmp_path):
    async with worker_port(authority.role(tmp_path, "worker")) as port:
        security = security_of(authority.role(tmp_path, "scheduler"), server_name=WORKER)
        channel = plan_channel(f"127.0.0.1:{port}", security)
        try:
            codes = {method: await code_of(channel, method) for method in METHODS}
            codes["/x.Y/Z"] = await code_of(channel, "/x.Y/Z")
        finally:
            await channel.close()
    assert not REFUSED & {code for method, code in codes.items() if Role.SCHEDULER in METHOD_ROLES.get(method, ())}
    absent = {code for method, code in codes.items() if Role.SCHEDULER not in METHOD_ROLES.get(method, ())}
    assert absent == {grpc.StatusCode.UNIMPLEMENTED}


async def test_s2_a_revoked_scheduler_is_cut_off_on_the_connection_it_has_and_another_is_not(authority, tmp_path):
    revoked, other = (authority.write(tmp_path / name, uris=("spiffe://forwardplane/scheduler",)) for name in "ab")
    worker = authority.role(tmp_path, "worker")
    watch, check = "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check"
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(worker_port(worker))
        channels, calls = [], []
        for folder in (revoked, other):
            channel = plan_channel(f"127.0.0.1:{port}", security_of(folder, server_name=WORKER))
            stack.push_async_callback(channel.close)
            channels.append(channel)
            calls.append(channel.unary_stream(watch)(b"", timeout=60))
            await calls[-1].read()

        authority.revoke(worker / "ca.crl", revoked)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await calls[0].read()
        assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "revoked" in ended.value.details()
        assert await code_of(channels[0], check) is grpc.StatusCode.UNAUTHENTICATED
        assert await code_of(channels[0], "/forwardplane.v1.WorkerService/Attach") is grpc.StatusCode.UNAUTHENTICATED
        assert await channels[1].unary_unary(check)(b"", timeout=WAIT_S)
        assert not calls[1].done()


async def test_hardened_has_no_reflection(authority, tmp_path):
    async with worker_port(authority.role(tmp_path, "worker"), hardened=True) as port:
        security = security_of(authority.role(tmp_path, "scheduler"), server_name=WORKER)
        channel = plan_channel(f"127.0.0.1:{port}", security)
        method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        try:
            assert await code_of(channel, method) is grpc.StatusCode.UNIMPLEMENTED
        finally:
            await channel.close()
