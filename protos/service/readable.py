"""Request bytes that are no message, or too many: a status of ours in place of gRPC's and a stack in the log.

gRPC deserialises before a handler runs and has no place to say what then. So reading never fails here: it gives a
marker, and whoever takes the request raises.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from google.protobuf.message import DecodeError

from protos.service.message_scan import has_too_many_fields
from protos.wire.errors import DataFault, MessageTooLarge, UnreadableRequest
from protos.wire.limits import MAX_FIELDS_OF_ONE_MESSAGE, MAX_MESSAGE_FIELDS


class Unreadable(Enum):
    """In place of a message."""

    BYTES = auto()
    FIELDS = auto()
    """Too many of them: the message was not made."""


@dataclass(frozen=True, slots=True)
class TooLarge:
    """In place of a message over the cap."""

    size: int
    limit: int


def tolerant(
    deserialise: Callable[[bytes], Any] | None, *, max_bytes: int | None = None
) -> Callable[[bytes], Any] | None:
    """The same deserialiser, with a marker for bytes it cannot read, or may not since they are too many."""
    if deserialise is None:
        return None
    message_class = getattr(deserialise, "__self__", None)
    has_schema = hasattr(message_class, "DESCRIPTOR")

    def read(data: bytes) -> Any:
        if max_bytes is not None and len(data) > max_bytes:
            return TooLarge(len(data), max_bytes)
        if has_schema and has_too_many_fields(message_class, data):
            return Unreadable.FIELDS
        try:
            return deserialise(data)
        except DecodeError:
            return Unreadable.BYTES

    return read


def checked(request: Any) -> Any:
    """The request of a unary call.

    Raises:
        UnreadableRequest: its bytes are no message, or have too many fields.
        MessageTooLarge: they are too many.
    """
    _check_size(request)
    if request is Unreadable.FIELDS:
        most = f"{MAX_MESSAGE_FIELDS} fields, or {MAX_FIELDS_OF_ONE_MESSAGE} in one of its messages"
        raise UnreadableRequest(f"the request has more than {most}; a packed list counts once")
    if request is Unreadable.BYTES:
        raise UnreadableRequest("the request's bytes are not a message of this call")
    return request


async def checked_calls(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The request of a unary call that is read as a stream.

    Raises:
        UnreadableRequest, MessageTooLarge: as `checked`.
    """
    async for request in requests:
        yield checked(request)


async def checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The requests of a stream.

    Raises:
        DataFault: the bytes of one are no message.
        MessageTooLarge: they are too many.
    """
    async for request in requests:
        _check_size(request)
        if isinstance(request, Unreadable):
            raise DataFault("the bytes of a message of the stream cannot be read")
        yield request


def _check_size(request: Any) -> None:
    if isinstance(request, TooLarge):
        raise MessageTooLarge(f"the request has {request.size} bytes; the limit is {request.limit}")
