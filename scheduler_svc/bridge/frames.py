"""Length-prefixed frames on a stream of one pod: four bytes of little-endian length, then a serialized message.

Knows nothing of the messages. Guards: no frame is above `MAX_BRIDGE_MESSAGE_BYTES`, on either side.
"""

import asyncio
import struct

from protos.wire.errors import DataFault, MessageTooLarge
from protos.wire.limits import MAX_BRIDGE_MESSAGE_BYTES

_LENGTH = struct.Struct("<I")


def frame(body: bytes) -> bytes:
    """The frame that carries `body`.

    Raises:
        MessageTooLarge: `body` is above the cap.
    """
    if len(body) > MAX_BRIDGE_MESSAGE_BYTES:
        message = f"bridge message of {len(body)} bytes is above the limit of {MAX_BRIDGE_MESSAGE_BYTES}"
        raise MessageTooLarge(message, field="body")
    return _LENGTH.pack(len(body)) + body


async def read_body(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame's body; None when the peer closed between two frames.

    Raises:
        DataFault: the peer closed inside a frame, or announced one above the cap.
    """
    try:
        prefix = await reader.readexactly(_LENGTH.size)
    except asyncio.IncompleteReadError as end:
        if not end.partial:
            return None
        raise DataFault("bridge stream ended inside a length prefix") from end
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_BRIDGE_MESSAGE_BYTES:
        message = f"bridge message of {length} bytes is above the limit of {MAX_BRIDGE_MESSAGE_BYTES}"
        raise DataFault(message, field="body")
    try:
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as end:
        raise DataFault("bridge stream ended inside a message", field="body") from end
