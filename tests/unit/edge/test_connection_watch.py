"""S17: the watched calls of a port, and how the one connection is closed that is meant."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from protos.wire.errors import InvalidRequest, MessageTooLarge, QuotaExceeded, Unauthenticated, UnreadableRequest
from scheduler_svc.edge.connection_conduct import MAX_WASTED
from scheduler_svc.edge.connection_watch import MESSAGE_WEIGHT, WatchInterceptor, close_connection

NOWHERE = "unix:nowhere"
GONE = "ipv4:10.1.2.3:65535"


@contextlib.contextmanager
def connection(family: socket.AddressFamily = socket.AF_INET, host: str = "127.0.0.1") -> Iterator[socket.socket]:
    """The client's end; the server's is in this process, too."""
    with socket.create_server((host, 0), family=family) as server:
        client = socket.create_connection(server.getsockname()[:2])
        accepted, _ = server.accept()
        with client, accepted:
            yield client


def is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_only_the_connection_with_that_peer_is_shut_down_and_no_descriptor_is_left():
    with connection() as client, connection() as other:
        before = num_descriptors()
        assert close_connection(f"ipv4:127.0.0.1:{client.getsockname()[1]}")
        assert is_closed(client)
        assert not is_closed(other)
        assert num_descriptors() == before


def test_a_peer_of_ipv6_is_found_by_the_name_that_grpc_gives_it():
    try:
        opened = connection(socket.AF_INET6, "::1")
        with opened as client:
            assert close_connection(f"ipv6:%5B::1%5D:{client.getsockname()[1]}")
            assert is_closed(client)
    except OSError:
        pytest.skip("no IPv6 here")


@pytest.mark.parametrize("peer", [NOWHERE, "ipv4:127.0.0.1:1", "ipv4:10.1.2.3:65535"])
def test_a_peer_that_is_gone_or_no_host_closes_nothing(peer):
    with connection() as client:
        assert close_connection(peer) is (peer != NOWHERE)
        assert not is_closed(client)


def counter() -> Counter:
    return Counter("closed", "closed", registry=CollectorRegistry())


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (UnreadableRequest("bytes"), MAX_WASTED / MESSAGE_WEIGHT),
        (MessageTooLarge("bytes"), MAX_WASTED / MESSAGE_WEIGHT),
        (Unauthenticated("token"), MAX_WASTED),
        (asyncio.CancelledError(), MAX_WASTED),
    ],
)
def test_calls_that_are_work_for_nothing_end_the_connection(error, calls):
    closed = counter()
    watch = WatchInterceptor(closed)
    for _ in range(int(calls) + 1):
        with pytest.raises(type(error)), watch._watched(NOWHERE):
            raise error
    assert closed._value.get() == 1
    with pytest.raises(QuotaExceeded) as refused, watch._watched(NOWHERE):
        pytest.fail("the call is served")
    assert refused.value.retry_after_ms > 0


async def test_the_last_calls_of_a_closed_connection_are_not_served_and_not_answered():
    watch = WatchInterceptor(counter())
    for _ in range(int(MAX_WASTED) + 1):
        with pytest.raises(Unauthenticated), watch._watched(GONE):
            raise Unauthenticated("token")
    with pytest.raises(asyncio.CancelledError), watch._watched(GONE):
        pytest.fail("the call is served")


def test_calls_that_are_refused_for_what_they_ask_are_no_waste():
    closed = counter()
    watch = WatchInterceptor(closed)
    for _ in range(int(MAX_WASTED) * 3):
        with pytest.raises(InvalidRequest), watch._watched(NOWHERE):
            raise InvalidRequest("top_p is 0")
    assert closed._value.get() == 0


async def test_a_call_that_ran_for_a_while_may_be_given_up():
    closed = counter()
    watch = WatchInterceptor(closed)

    async def runs() -> None:
        with watch._watched(NOWHERE):
            await asyncio.sleep(0.1)
            raise asyncio.CancelledError

    await asyncio.gather(*(runs() for _ in range(int(MAX_WASTED) * 2)), return_exceptions=True)
    assert closed._value.get() == 0
