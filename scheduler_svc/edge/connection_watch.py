"""Watches the calls of a port that has no patience, and closes connections that waste most of theirs.

gRPC closes none for its Python servers. It leaves their descriptors in this process, though: the one whose other end is
the peer of a call is shut down, and gRPC takes it for the peer's leaving. Guards: a descriptor of anything else is
never touched.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import grpc
from prometheus_client import Counter

from protos.service.handlers import Context, Handler, async_behaviour, surrounded
from protos.wire.errors import EngineError, MessageTooLarge, QuotaExceeded, Unauthenticated, UnreadableRequest
from scheduler_svc.edge.connection_conduct import JUDGED_S, ConnectionConduct, Standing

_logger = logging.getLogger(__name__)

GIVEN_UP_S = 0.02
"""A call that its caller gives up sooner was made to be given up."""
MESSAGE_WEIGHT = 5.0
"""Of a message that cannot be read, in calls."""
_DESCRIPTORS = Path("/proc/self/fd")
_KINDS = ("ipv4:", "ipv6:")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class WatchInterceptor(grpc.aio.ServerInterceptor):
    """Inside the status border, in front of everything else."""

    def __init__(self, closed: Counter, conduct: ConnectionConduct | None = None) -> None:
        """Count connections that were closed in `closed`."""
        self._closed = closed
        self._conduct = conduct or ConnectionConduct(time.monotonic, close_connection)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The handler of this call, watched; handlers that are not asynchronous stay as they are."""
        handler = cast(Any, await continuation(handler_call_details))
        behaviour = async_behaviour(handler)
        if behaviour is None:
            return cast(Handler, handler)
        return surrounded(handler, behaviour, self._inside, deserializer=handler.request_deserializer)

    async def _inside(self, context: Context, answer: Callable[[], Awaitable[Any]]) -> Any:
        with self._watched(context.peer()):
            return await answer()

    @contextmanager
    def _watched(self, peer: str) -> Iterator[None]:
        standing = self._conduct.standing(peer)
        if standing is Standing.CLOSED:
            raise asyncio.CancelledError
        if standing is Standing.JUDGED:
            message = "this connection wasted most of its calls; it is served no more"
            raise QuotaExceeded(message, retry_after_ms=int(JUDGED_S * 1000))
        began = time.monotonic()
        try:
            yield
        except asyncio.CancelledError:
            self._ended(peer, weight=1.0 if time.monotonic() - began < GIVEN_UP_S else 0.0)
            raise
        except EngineError as error:
            self._ended(peer, weight=_weight(error))
            raise
        self._conduct.good(peer)

    def _ended(self, peer: str, *, weight: float) -> None:
        if not weight:
            self._conduct.good(peer)
        elif self._conduct.wasted(peer, weight=weight):
            self._closed.inc()
            _logger.warning("a connection that wasted most of its calls is ended")


def close_connection(peer: str) -> bool:
    """Shut down this process's TCP connection with `peer`, as gRPC names it, if its peer has not closed it itself.

    False: connections cannot be closed here.
    """
    if not peer.startswith(_KINDS) or not _DESCRIPTORS.is_dir():
        return False
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    wanted = (host.strip("[]"), int(port))
    any(_shut_down_if_with(int(entry.name), wanted) for entry in _DESCRIPTORS.iterdir())
    return True


def _shut_down_if_with(descriptor: int, wanted: tuple[str, int]) -> bool:
    """A copy is looked at and shut down, so that the descriptor may be closed and used anew meanwhile."""
    with contextlib.suppress(OSError), _copy_of(descriptor) as connection:
        if connection.type != socket.SOCK_STREAM or connection.family not in _FAMILIES:
            return False
        host, port = connection.getpeername()[:2]
        # gRPC names a peer of IPv4 on a socket of IPv6 by its IPv4 address.
        if wanted in ((host, port), (host.removeprefix("::ffff:"), port)):
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _copy_of(descriptor: int) -> socket.socket:
    """A socket over a copy of the descriptor.

    Raises:
        OSError: it is closed by now, or no socket.
    """
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _weight(error: EngineError) -> float:
    """In wasted calls. What a call asks in a message that can be read is no waste, however wrong it is."""
    if isinstance(error, UnreadableRequest | MessageTooLarge):
        return MESSAGE_WEIGHT
    return 1.0 if isinstance(error, Unauthenticated) else 0.0
