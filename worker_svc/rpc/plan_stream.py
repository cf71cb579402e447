"""The answers of one `Execute` call, in order, and how they travel.

Guards: what waits for a slow reader stays bounded, since a caller is read no further while its answers wait.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from protos.forwardplane.v1.worker_pb2 import (
    DrainNotice,
    ExecuteReply,
    Gap,
    NeedFull,
    Opened,
    ResultMessage,
    Stale,
)
from protos.wire.codec import checksum, encode_result
from protos.wire.errors import EngineError
from worker_svc.protocol.messages import (
    DrainAnswer,
    NeedFullAnswer,
    OpenedAnswer,
    PlanResult,
    ReplyBody,
    SequenceGapAnswer,
    StaleAnswer,
)

MAX_WAITING_REPLIES = 16


@dataclass(frozen=True, slots=True)
class _End:
    error: EngineError | None


class PlanStream:
    """Made for one call; filled by the protocol's shell, emptied by the call's handler."""

    def __init__(self, key: int) -> None:
        self.key = key
        self._waiting: asyncio.Queue[ReplyBody | _End] = asyncio.Queue()
        self._has_room = asyncio.Event()
        self._has_room.set()

    def put(self, body: ReplyBody) -> None:
        """Answer behind everything put before."""
        self._waiting.put_nowait(body)
        if self._waiting.qsize() >= MAX_WAITING_REPLIES:
            self._has_room.clear()

    def end(self, error: EngineError | None) -> None:
        """End the call behind everything put before."""
        self._waiting.put_nowait(_End(error))

    async def room(self) -> None:
        """Wait until the caller has read enough to be listened to again."""
        await self._has_room.wait()

    async def replies(self) -> AsyncIterator[ExecuteReply]:
        """The answers until the end.

        Raises:
            EngineError: what the call ends with.
        """
        while True:
            body = await self._waiting.get()
            if isinstance(body, _End):
                if body.error is not None:
                    raise body.error
                return
            if self._waiting.qsize() < MAX_WAITING_REPLIES:
                self._has_room.set()
            yield encode_reply(body)


def encode_reply(body: ReplyBody) -> ExecuteReply:
    """The message that carries `body`."""
    if isinstance(body, PlanResult):
        encoded = encode_result(body.result)
        return ExecuteReply(result=ResultMessage(body=encoded, crc32=checksum(encoded)))
    if isinstance(body, NeedFullAnswer):
        return ExecuteReply(need_full=NeedFull(seq=body.seq))
    if isinstance(body, SequenceGapAnswer):
        return ExecuteReply(gap=Gap(expected_seq=body.expected_seq, received_seq=body.received_seq))
    if isinstance(body, StaleAnswer):
        return ExecuteReply(stale=Stale(seq=body.seq, expected_seq=body.expected_seq))
    if isinstance(body, OpenedAnswer):
        return ExecuteReply(opened=Opened(expected_seq=body.expected_seq))
    assert isinstance(body, DrainAnswer)
    return ExecuteReply(drain=DrainNotice(reason=body.reason))
