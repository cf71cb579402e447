"""Running streams to one HTTP answer: whole, or as server-sent events side by side.

Guards: the first failure ends the others; what was written before it is whole events.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, aclosing, suppress
from dataclasses import dataclass
from typing import NamedTuple

from aiohttp import web

from protos.wire.errors import EngineError
from scheduler_svc.edge.caller_stream import CallerStream
from scheduler_svc.edge.http_front.event_stream import EventStream, encode
from scheduler_svc.edge.http_front.http_errors import error_reply
from scheduler_svc.edge.http_front.replies import Answer
from scheduler_svc.edge.slow_readers import note_slow
from scheduler_svc.edge.stream_reading import paced_chunks, whole_generation
from scheduler_svc.edge.stream_record import StreamRecord
from scheduler_svc.edge.write_pacing import WritePacing

OK = "OK"


class Answered(NamedTuple):
    """The end of a call."""

    response: web.StreamResponse
    code: str
    """Name of the gRPC code that the other door would have given."""
    is_stuck: bool = False
    """The caller takes nothing more: its connection is to be cut, unless it takes the rest soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The streams of one call, and who words their output."""

    streams: Sequence[CallerStream]
    records: Sequence[StreamRecord]
    answer: Answer
    in_callers_words: Callable[[], AbstractContextManager[None]]
    """Errors inside are told by the fields that the caller sent."""


async def answer_whole(begun: Begun) -> Answered:
    """One object, when all streams have finished.

    Raises:
        EngineError: one did not finish well.
    """
    generations = await asyncio.gather(*(whole_generation(stream) for stream in begun.streams))
    body = encode(begun.answer.whole(generations))
    headers = {"x-request-id": begun.streams[0].names.request_id}
    return Answered(web.Response(body=body, content_type="application/json", headers=headers), OK)


async def answer_streamed(begun: Begun, events: EventStream, *, pacing: WritePacing, has_usage_event: bool) -> Answered:
    """Events as streams give chunks. A failure behind the first event is the last one.

    Raises:
        EngineError: a failure before the first event.
    """
    try:
        with begun.in_callers_words():
            await _write_streams(begun, events, pacing)
        if has_usage_event:
            await events.send([begun.answer.usage_event([stream.usage for stream in begun.streams])])
        await events.finish()
    except EngineError as error:
        if not events.has_begun:
            raise
        if events.is_stuck:
            note_slow(begun.streams)
            await events.leave(error_reply(error).body())
        else:
            with suppress(EngineError):
                await events.send([error_reply(error).body()])
        return Answered(events.response, error.status, events.is_stuck)
    return Answered(events.response, OK)


async def _write_streams(begun: Begun, events: EventStream, pacing: WritePacing) -> None:
    async def write(index: int) -> None:
        async with aclosing(paced_chunks(begun.streams[index], begun.records[index], pacing)) as chunks:
            async for chunk in chunks:
                await events.send(begun.answer.events(index, chunk))

    failures: list[BaseException] = []
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(len(begun.streams)):
                group.create_task(write(index))
    except* EngineError as caught:
        failures.extend(caught.exceptions)
    if failures:
        raise failures[0]
