"""GenerationClient and AsyncGenerationClient: what callers import to talk to a scheduler.

Both raise the error taxonomy of `protos.wire.errors`, never a `grpc.RpcError`. A stream that the caller stops reading
is cancelled on the server. Neither keeps state beyond its channel.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

import grpc
import grpc.aio

from protos.client.embed_messages import Embedding, EmbedOptions, embed_request, embeddings_from
from protos.client.load_messages import Load, load_from
from protos.client.messages import (
    Chat,
    Chunk,
    GenerateOptions,
    Generation,
    ModelDescription,
    Prompt,
    chunk_from,
    generation_from,
    model_from,
)
from protos.client.request_messages import (
    abort_request,
    detokenize_request,
    generate_once_request,
    generate_request,
    tokenize_request,
)
from protos.client.resuming import DEFAULT_RESUME_S, Patience, ResumableStream
from protos.client.server_access import CallerCredentials
from protos.forwardplane.v1 import generate_pb2, generate_pb2_grpc
from protos.service.channel import Options, caller_channel, only_serving_options, sync_caller_channel
from protos.service.status import from_rpc_error
from protos.wire.errors import RequestAborted

DEFAULT_OPTIONS = GenerateOptions()
DEFAULT_EMBEDDING = EmbedOptions()
NOBODY = CallerCredentials()
UNARY_TIMEOUT_S = 30.0
_SERVICE = generate_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")


def _choice(*, only_serving: bool) -> Options:
    return only_serving_options(_SERVICE) if only_serving else ()


class GenerationClient:
    """Blocking client of one scheduler. Safe to share between threads; close it, or use it as a context manager."""

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float | None = None,
        resume_s: float = DEFAULT_RESUME_S,
        credentials: CallerCredentials = NOBODY,
        only_serving: bool = False,
    ) -> None:
        """Open a lazy channel; nothing is sent yet.

        Args:
            target: `HOST:PORT` of a scheduler edge, or any gRPC target.
            timeout_s: deadline of each generation in seconds; None leaves it to the server (600 s).
            resume_s: how long a generation that lost its scheduler looks for one that goes on with it; 0: not at all.
            credentials: as whom to call; absent: in plain text, as nobody.
            only_serving: `target` names several schedulers, of which one serves and others wait: call that one, by
                the health that each says of itself. Where callers have tokens it needs a certificate beside.
        """
        self._target = target
        self._timeout_s = timeout_s
        self._resume_s = resume_s
        self._is_closed = False
        self._who = credentials.metadata()
        self._channel = sync_caller_channel(target, credentials.security(), options=_choice(only_serving=only_serving))
        self._stub = generate_pb2_grpc.GenerationServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; running streams are cancelled."""
        self._is_closed = True
        self._channel.close()

    def stream(self, prompt: Prompt, options: GenerateOptions = DEFAULT_OPTIONS) -> Iterator[Chunk]:
        """Chunks as the server releases them; each sample's last one carries finish, usage and seed.

        A stream that loses its scheduler goes on behind what has come, where the server gives resume tickets.

        Raises:
            EngineError: the class that the server raised, or UnavailableError when no server answers.
        """
        request = generate_request(prompt, options)
        stream = ResumableStream(request, timeout_s=self._timeout_s, resume_s=self._resume_s)
        while (rest := stream.rest()) is not None:
            check_open(is_closed=self._is_closed)
            call = self._stub.Generate(rest, timeout=stream.timeout_s(), metadata=self._who)
            try:
                for message in call:
                    stream.take(message)
                    yield chunk_from(message)
            except grpc.RpcError as error:
                time.sleep(pause_s(stream, error, target=self._target))
            else:
                return
            finally:
                call.cancel()

    def generate(self, prompts: Sequence[Prompt], options: GenerateOptions = DEFAULT_OPTIONS) -> list[Generation]:
        """Whole answers, in the order of the prompts; samples of one prompt follow each other.

        A call that loses its scheduler is made again from the start.

        Raises:
            EngineError: as `stream`; one refused prompt refuses the call.
        """
        request = generate_once_request(prompts, options)
        patience = Patience(self._resume_s)
        while True:
            check_open(is_closed=self._is_closed)
            try:
                reply = self._stub.GenerateOnce(request, timeout=self._timeout_s, metadata=self._who)
                break
            except grpc.RpcError as error:
                time.sleep(pause_s(patience, error, target=self._target))
        return [generation_from(message) for message in reply.generations]

    def embed(self, prompts: Sequence[Prompt], options: EmbedOptions = DEFAULT_EMBEDDING) -> list[Embedding]:
        """One vector for each prompt, or the error of the first that was refused or failed.

        Raises:
            EngineError: as `stream`.
        """
        request = embed_request(prompts, options)
        return embeddings_from(self._ask(self._stub.Embed, request, timeout_s=self._timeout_s))

    def abort(self, request_id: str) -> None:
        """End a running request of this caller.

        Raises:
            UnknownRequest: nothing with that id runs.
        """
        self._ask(self._stub.Abort, abort_request(request_id))

    def tokenize(self, prompt: str | Chat) -> list[int]:
        """Ids of a text, or of a chat through the model's template."""
        return list(self._ask(self._stub.Tokenize, tokenize_request(prompt)).token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return self._ask(self._stub.Detokenize, detokenize_request(token_ids)).text

    def model(self) -> ModelDescription:
        """What the server serves."""
        return model_from(self._ask(self._stub.GetModel, generate_pb2.GetModelRequest()))

    def load(self) -> Load:
        """How busy the server and its workers are."""
        return load_from(self._ask(self._stub.GetLoad, generate_pb2.GetLoadRequest()))

    def flush_cache(self) -> int:
        """Empty the server's prefix caches; the number of pages that are free at once by that."""
        return self._ask(self._stub.FlushCache, generate_pb2.FlushCacheRequest()).freed_pages

    def _ask(
        self,
        method: "grpc.UnaryUnaryMultiCallable[RequestT, ReplyT]",
        request: RequestT,
        *,
        timeout_s: float | None = UNARY_TIMEOUT_S,
    ) -> ReplyT:
        """One call of one answer, which is not made again.

        Raises:
            EngineError: the class that the server raised, or UnavailableError when no server answers.
        """
        try:
            return method(request, timeout=timeout_s, metadata=self._who)
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=self._target) from error


class AsyncGenerationClient:
    """Asyncio client of one scheduler, for one event loop. Close it, or use it with `async with`."""

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float | None = None,
        resume_s: float = DEFAULT_RESUME_S,
        credentials: CallerCredentials = NOBODY,
        only_serving: bool = False,
    ) -> None:
        """Open a lazy channel; arguments as for `GenerationClient`."""
        self._target = target
        self._timeout_s = timeout_s
        self._resume_s = resume_s
        self._is_closed = False
        self._who = credentials.metadata()
        self._channel = caller_channel(target, credentials.security(), options=_choice(only_serving=only_serving))
        self._stub = generate_pb2_grpc.GenerationServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel; running streams are cancelled."""
        self._is_closed = True
        await self._channel.close()

    async def stream(self, prompt: Prompt, options: GenerateOptions = DEFAULT_OPTIONS) -> AsyncIterator[Chunk]:
        """As `GenerationClient.stream`."""
        request = generate_request(prompt, options)
        stream = ResumableStream(request, timeout_s=self._timeout_s, resume_s=self._resume_s)
        while (rest := stream.rest()) is not None:
            check_open(is_closed=self._is_closed)
            call = self._stub.Generate(rest, timeout=stream.timeout_s(), metadata=self._who)
            try:
                async for message in call:
                    stream.take(message)
                    yield chunk_from(message)
            except grpc.RpcError as error:
                await asyncio.sleep(pause_s(stream, error, target=self._target))
            else:
                return
            finally:
                call.cancel()

    async def generate(self, prompts: Sequence[Prompt], options: GenerateOptions = DEFAULT_OPTIONS) -> list[Generation]:
        """As `GenerationClient.generate`."""
        request = generate_once_request(prompts, options)
        patience = Patience(self._resume_s)
        while True:
            check_open(is_closed=self._is_closed)
            try:
                reply = await self._stub.GenerateOnce(request, timeout=self._timeout_s, metadata=self._who)
                break
            except grpc.RpcError as error:
                await asyncio.sleep(pause_s(patience, error, target=self._target))
        return [generation_from(message) for message in reply.generations]

    async def embed(self, prompts: Sequence[Prompt], options: EmbedOptions = DEFAULT_EMBEDDING) -> list[Embedding]:
        """As `GenerationClient.embed`."""
        request = embed_request(prompts, options)
        return embeddings_from(await self._ask(self._stub.Embed, request, timeout_s=self._timeout_s))

    async def abort(self, request_id: str) -> None:
        """As `GenerationClient.abort`."""
        await self._ask(self._stub.Abort, abort_request(request_id))

    async def tokenize(self, prompt: str | Chat) -> list[int]:
        """As `GenerationClient.tokenize`."""
        return list((await self._ask(self._stub.Tokenize, tokenize_request(prompt))).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """As `GenerationClient.detokenize`."""
        return (await self._ask(self._stub.Detokenize, detokenize_request(token_ids))).text

    async def model(self) -> ModelDescription:
        """As `GenerationClient.model`."""
        return model_from(await self._ask(self._stub.GetModel, generate_pb2.GetModelRequest()))

    async def load(self) -> Load:
        """As `GenerationClient.load`."""
        return load_from(await self._ask(self._stub.GetLoad, generate_pb2.GetLoadRequest()))

    async def flush_cache(self) -> int:
        """As `GenerationClient.flush_cache`."""
        return (await self._ask(self._stub.FlushCache, generate_pb2.FlushCacheRequest())).freed_pages

    async def _ask(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[RequestT, ReplyT]",
        request: RequestT,
        *,
        timeout_s: float | None = UNARY_TIMEOUT_S,
    ) -> ReplyT:
        """As `GenerationClient._ask`."""
        try:
            return await method(request, timeout=timeout_s, metadata=self._who)
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=self._target) from error


def pause_s(asked: ResumableStream | Patience, error: grpc.RpcError, *, target: str) -> float:
    """How long to wait before asking again for what `asked` is about.

    Raises:
        EngineError: not to be asked for again.
    """
    failure = from_rpc_error(error, target=target)
    seconds = asked.pause_s(failure)
    if seconds is None:
        raise asked.final(failure) from error
    return seconds


def check_open(*, is_closed: bool) -> None:
    """Whether a call may begin.

    Raises:
        RequestAborted: the client was closed, maybe while a stream looked for its next scheduler.
    """
    if is_closed:
        raise RequestAborted("the client is closed")
