"""/v1/chat/completions and /v1/completions: from a body to streams of the core and back.

The same admission, streams, records and limits as the gRPC door. Guards: whatever ends a call, its streams end with it.
"""

import asyncio
import time
from collections.abc import Callable

from aiohttp import web

from protos.wire.limits import DEFAULT_DEADLINE_S
from scheduler_svc.edge.admission import MAX_HELD_IDS
from scheduler_svc.edge.call_traces import HEADER
from scheduler_svc.edge.caller_identity import CallerIdentity
from scheduler_svc.edge.edge_parts import EdgeParts
from scheduler_svc.edge.http_front.answering import Answered, Begun, answer_streamed, answer_whole
from scheduler_svc.edge.http_front.asked import Asked, asked_of_chat, asked_of_completion
from scheduler_svc.edge.http_front.event_stream import EventStream
from scheduler_svc.edge.http_front.replies import Head
from scheduler_svc.edge.metrics import counting_rejections
from scheduler_svc.edge.running import running
from scheduler_svc.edge.write_pacing import WritePacing

_MAX_READ_ON_LOOP = 64 << 10
"""Bytes of a body; a longer one may take as long as a step of the core, and is read beside other streams."""


class GenerationCalls:
    """Made by the HTTP server."""

    def __init__(self, parts: EdgeParts, *, write_limit_s: float) -> None:
        """Serve with `parts`; a caller that takes nothing for `write_limit_s` is given up."""
        self._parts = parts
        self._write_limit_s = write_limit_s
        self._pacing = WritePacing(lambda: parts.link.num_streams)

    async def chat(self, http: web.Request, body: bytes, caller: CallerIdentity) -> Answered:
        """Answer a chat.

        Raises:
            EngineError: refused, or failed before anything was written.
        """
        return await self._answer(http, body, asked_of_chat, caller=caller)

    async def completion(self, http: web.Request, body: bytes, caller: CallerIdentity) -> Answered:
        """Answer a completion of one or more prompts.

        Raises:
            EngineError: as `chat`.
        """
        return await self._answer(http, body, asked_of_completion, caller=caller)

    async def _answer(
        self, http: web.Request, body: bytes, read: Callable[[bytes], Asked], *, caller: CallerIdentity
    ) -> Answered:
        arrived = asyncio.get_running_loop().time()
        deadline = arrived + DEFAULT_DEADLINE_S
        link, metrics = self._parts.link, self._parts.metrics
        with counting_rejections(metrics):
            asked = read(body) if len(body) <= _MAX_READ_ON_LOOP else await asyncio.to_thread(read, body)
        carriers = http.headers.getall(HEADER, [])
        with asked.in_callers_words():
            with counting_rejections(metrics), self._parts.traces.admitting(http.path, carriers) as trace:
                trace.asked(asked.generations)
                streams = await self._parts.admission.open_streams(
                    asked.generations,
                    caller,
                    deadline=deadline,
                    max_held_ids=MAX_HELD_IDS if asked.is_streamed else None,
                    traceparent=trace.traceparent,
                )
            with running(
                streams, link=link, metrics=metrics, arrived=arrived, deadline=deadline, trace=trace
            ) as records:
                head = self._head(streams[0].names.request_id, asked)
                answer = asked.answer(head, streams, tokenizer=self._parts.tokenizer, facts=link.facts)
                begun = Begun(streams=streams, records=records, answer=answer, in_callers_words=asked.in_callers_words)
                if not asked.is_streamed:
                    return await answer_whole(begun)
                events = EventStream(http, request_id=head.request_id, write_limit_s=self._write_limit_s)
                return await answer_streamed(begun, events, pacing=self._pacing, has_usage_event=asked.has_usage_event)

    def _head(self, request_id: str, asked: Asked) -> Head:
        facts = self._parts.link.facts
        traits = (facts.card.weights_fingerprint[:12], facts.dtype, facts.numerics)
        return Head(
            request_id=request_id,
            created=int(time.time()),
            model=facts.card.name,
            fingerprint="-".join(("fp", *filter(None, traits))),
            has_usage=asked.has_usage_event,
        )
