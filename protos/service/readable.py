"""Request bytes that are no message: a status of ours in place of gRPC's own and a stack in the log for each call.

gRPC deserialises before a handler runs and has no place to say what then. So reading never fails here: it gives a
marker, and whoever takes the request raises.
"""

from collections.abc import AsyncIterator, Callable
from enum import Enum, auto
from typing import Any

from google.protobuf.message import DecodeError

from protos.wire.errors import DataFault, InvalidRequest


class Unreadable(Enum):
    """In place of a message."""

    BYTES = auto()


def tolerant(deserialise: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """The same deserialiser, with the marker for bytes it cannot read."""
    if deserialise is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialise(data)
        except DecodeError:
            return Unreadable.BYTES

    return read


def checked(request: Any) -> Any:
    """The request of a unary call.

    Raises:
        InvalidRequest: its bytes are no message.
    """
    if request is Unreadable.BYTES:
        raise InvalidRequest("the request's bytes are not a message of this call")
    return request


async def checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The requests of a stream.

    Raises:
        DataFault: the bytes of one are no message.
    """
    async for request in requests:
        if request is Unreadable.BYTES:
            raise DataFault("the bytes of a message of the stream cannot be read")
        yield request
