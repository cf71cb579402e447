"""The callers' service: each call to a stream of the core and back.

Errors of the taxonomy leave as they are; `protos.service.status` makes statuses of them. Guards: whatever ends a call,
its streams end with it.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message
from typing_extensions import override

from protos.forwardplane.v1 import generate_pb2, generate_pb2_grpc
from protos.wire.errors import MessageTooLarge
from protos.wire.limits import DEFAULT_DEADLINE_S, MAX_CALLER_MESSAGE_BYTES, MAX_DEADLINE_S
from scheduler_svc.edge.call_traces import HEADER
from scheduler_svc.edge.edge_parts import EdgeParts
from scheduler_svc.edge.embedder import Called, Times, embeddings
from scheduler_svc.edge.interleaved import interleaved
from scheduler_svc.edge.metrics import counting_rejections
from scheduler_svc.edge.running import running
from scheduler_svc.edge.stream_reading import paced_chunks, whole_generation
from scheduler_svc.edge.validate_request import validate_abort
from scheduler_svc.edge.write_pacing import WritePacing

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class GenerationServicer(generate_pb2_grpc.GenerationServiceServicer):
    """Made by the edge's composition root."""

    def __init__(self, parts: EdgeParts) -> None:
        self._parts = parts
        self._link = parts.link
        self._admission = parts.admission
        self._door = parts.door
        self._encoder = parts.encoder
        self._metrics = parts.metrics
        self._traces = parts.traces
        self._version = parts.version
        self._pacing = WritePacing(lambda: parts.link.num_streams)

    @override
    async def Generate(
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        """One prompt; chunks as they are released. Headers leave with the first chunk, so a refusal has none."""
        arrived = _now()
        deadline = arrived + _time_left_s(context)
        with counting_rejections(self._metrics), self._traces.admitting("Generate", _carriers(context)) as trace:
            trace.asked([request])
            caller = self._door.caller(context)
            streams = await self._admission.open_samples(
                request, caller, deadline=deadline, traceparent=trace.traceparent
            )
        with running(
            streams, link=self._link, metrics=self._metrics, arrived=arrived, deadline=deadline, trace=trace
        ) as records:
            pairs = zip(streams, records, strict=True)
            sources = [paced_chunks(stream, record, self._pacing) for stream, record in pairs]
            async with aclosing(interleaved(sources) if len(sources) > 1 else sources[0]) as chunks:
                tickets = [stream.names.ticket for stream in streams if stream.names.ticket]
                async for chunk in _after_headers(chunks, context, tickets=tickets):
                    yield chunk

    @override
    async def GenerateOnce(
        self, request: generate_pb2.GenerateOnceRequest, context: Context
    ) -> generate_pb2.GenerateOnceReply:
        """All prompts, or the error of the first that was refused or failed; the others are cancelled then."""
        arrived = _now()
        deadline = arrived + _time_left_s(context)
        with counting_rejections(self._metrics), self._traces.admitting("GenerateOnce", _carriers(context)) as trace:
            trace.asked(request.requests)
            caller = self._door.caller(context)
            streams = await self._admission.open_streams(
                request.requests, caller, deadline=deadline, traceparent=trace.traceparent
            )
        with running(streams, link=self._link, metrics=self._metrics, arrived=arrived, deadline=deadline, trace=trace):
            generations = await asyncio.gather(*(whole_generation(stream) for stream in streams))
        reply = generate_pb2.GenerateOnceReply(generations=generations)
        _check_size(reply, advice="use Generate, which streams")
        return reply

    @override
    async def Abort(self, request: generate_pb2.AbortRequest, context: Context) -> generate_pb2.AbortReply:
        """End a running request of the same caller, whichever edge serves it; its stream ends with CANCELLED."""
        with counting_rejections(self._metrics):
            validate_abort(request, self._link.facts)
        await self._link.abort(request.request_id, self._door.caller(context))
        return generate_pb2.AbortReply()

    @override
    async def Tokenize(self, request: generate_pb2.TokenizeRequest, context: Context) -> generate_pb2.TokenizeReply:
        """The ids that `Generate` would make of the same input."""
        with counting_rejections(self._metrics):
            return generate_pb2.TokenizeReply(token_ids=await self._encoder.tokenize(request, self._link.facts))

    @override
    async def Detokenize(
        self, request: generate_pb2.DetokenizeRequest, context: Context
    ) -> generate_pb2.DetokenizeReply:
        """The text of ids; broken characters come out as U+FFFD."""
        with counting_rejections(self._metrics):
            return generate_pb2.DetokenizeReply(text=await self._encoder.detokenize(request, self._link.facts))

    @override
    async def Embed(self, request: generate_pb2.EmbedRequest, context: Context) -> generate_pb2.EmbedReply:
        """All inputs, or the error of the first that was refused or failed."""
        arrived = _now()
        times = Times(arrived, arrived + _time_left_s(context), Called("Embed", _carriers(context)))
        caller = self._door.caller(context)
        reply = generate_pb2.EmbedReply(embeddings=await embeddings(request, self._parts, caller, times=times))
        _check_size(reply, advice="ask for fewer at a time")
        return reply

    @override
    async def GetModel(self, request: generate_pb2.GetModelRequest, context: Context) -> generate_pb2.GetModelReply:
        """What is served. Works without a worker; what only workers know is empty then."""
        facts = self._link.facts
        return generate_pb2.GetModelReply(
            name=facts.card.name,
            context_tokens=facts.context_tokens,
            vocab_size=facts.card.vocab_size,
            logits_width=facts.logits_width,
            eos_token_ids=facts.card.eos_token_ids,
            has_chat_template=facts.has_chat_template,
            dtype=facts.dtype,
            numerics=facts.numerics,
            version=self._version,
        )

    @override
    async def GetLoad(self, request: generate_pb2.GetLoadRequest, context: Context) -> generate_pb2.GetLoadReply:
        """How busy the core and its workers are."""
        return await self._link.questions.load()

    @override
    async def FlushCache(
        self, request: generate_pb2.FlushCacheRequest, context: Context
    ) -> generate_pb2.FlushCacheReply:
        """Empty the prefix caches of all workers."""
        return await self._link.questions.flush_cache()


async def _after_headers(
    chunks: AsyncIterator[generate_pb2.GenerateChunk], context: Context, *, tickets: Sequence[bytes]
) -> AsyncIterator[generate_pb2.GenerateChunk]:
    async for first in chunks:
        await context.send_initial_metadata((("request-id", first.request_id),))
        first.resume_tickets.extend(tickets)
        yield first
        break
    async for chunk in chunks:
        yield chunk


def _check_size(reply: Message, *, advice: str) -> None:
    size = reply.ByteSize()
    if size > MAX_CALLER_MESSAGE_BYTES:
        raise MessageTooLarge(f"the reply has {size} bytes; the limit is {MAX_CALLER_MESSAGE_BYTES}: {advice}")


def _time_left_s(context: Context) -> float:
    left = context.time_remaining()
    return min(DEFAULT_DEADLINE_S if left is None else left, MAX_DEADLINE_S)


def _carriers(context: Context) -> list[str | bytes]:
    return [value for name, value in context.invocation_metadata() or () if name == HEADER]


def _now() -> float:
    return asyncio.get_running_loop().time()
