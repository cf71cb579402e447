"""Server-sent events of one call.

Knows nothing of what the events say. Guards: headers leave with the first event, so that a refusal can still be a
status; a caller that does not read is given up.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from aiohttp import web

from protos.wire.errors import CapacityError, RequestAborted

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_NO_WAIT_S = 0.01
"""The write itself waits for nothing; only its wait for room behind it is cut short."""
_DONE = b"data: [DONE]\n\n"


class EventStream:
    """Made by the handler of a call; its streams may write at the same time."""

    def __init__(self, request: web.Request, *, request_id: str, write_limit_s: float) -> None:
        """Begin without having sent anything.

        Args:
            request: to be answered.
            request_id: goes into the headers.
            write_limit_s: most seconds a caller may leave no room for one event.
        """
        self._request = request
        self._write_limit_s = write_limit_s
        self._one_at_a_time = asyncio.Lock()
        self.is_stuck = False
        """The caller did not take what was written in time; nothing more can be."""
        self.response = web.StreamResponse(headers={**_HEADERS, "x-request-id": request_id})

    @property
    def has_begun(self) -> bool:
        """The headers have left."""
        return self.response.prepared

    async def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Write them.

        Raises:
            RequestAborted: the caller left.
            CapacityError: the caller reads too slowly.
        """
        await self._write(b"".join(b"data: " + encode(event) + b"\n\n" for event in events))

    async def finish(self) -> None:
        """Say that there is no more.

        Raises:
            EngineError: as `send`.
        """
        await self._write(_DONE)

    async def leave(self, event: Mapping[str, Any]) -> None:
        """A last event for a caller that takes nothing: behind what waits for it, without waiting until it is taken.

        The connection ends behind it.
        """
        self.response.force_close()
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(_NO_WAIT_S):
                await self.response.write(b"data: " + encode(event) + b"\n\n")

    async def _write(self, data: bytes) -> None:
        try:
            async with self._one_at_a_time, asyncio.timeout(self._write_limit_s):
                if not self.response.prepared:
                    await self.response.prepare(self._request)
                if data:
                    await self.response.write(data)
        except TimeoutError as error:
            self.is_stuck = True
            message = f"the caller reads too slowly: nothing was taken for {self._write_limit_s} s"
            raise CapacityError(message) from error
        except ConnectionError as error:
            raise RequestAborted("the caller left") from error


def encode(data: Mapping[str, Any]) -> bytes:
    """JSON in one line."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
