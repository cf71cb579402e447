"""What an edge asks the core beside its streams: one question of a kind at a time, one answer for all who ask it."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from protos.forwardplane.v1.bridge_pb2 import CoreToEdge
from protos.forwardplane.v1.generate_pb2 import FlushCacheReply, GetLoadReply
from protos.wire.errors import UnavailableError

_TIMEOUT_S = 5.0

AnswerT = TypeVar("AnswerT")


class _Question(Generic[AnswerT]):
    """Those who wait for the next answer."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._waiters: list[asyncio.Future[AnswerT]] = []

    async def answer(self) -> AnswerT:
        if not self._waiters:
            self._ask()
        waiter: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await waiter
        except TimeoutError as error:
            raise UnavailableError("the scheduler core does not answer") from error
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def answered(self, answer: AnswerT) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(answer)

    def failed(self, error: UnavailableError) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)


class CoreQuestions:
    """Made and fed by `CoreLink`."""

    def __init__(self, *, ask_load: Callable[[], None], ask_flush: Callable[[], None]) -> None:
        self._load: _Question[GetLoadReply] = _Question(ask_load)
        self._flush: _Question[FlushCacheReply] = _Question(ask_flush)
        self._flushing = asyncio.Lock()
        self._is_gone = False

    async def load(self) -> GetLoadReply:
        """The core's load now.

        Raises:
            UnavailableError: the core is gone or does not answer.
        """
        self._check_there()
        return await self._load.answer()

    async def flush_cache(self) -> FlushCacheReply:
        """Empty every prefix cache.

        Raises:
            UnavailableError: the core is gone or does not answer.
        """
        async with self._flushing:  # the answer to an earlier flush would not cover what was computed since
            self._check_there()
            return await self._flush.answer()

    def take(self, message: CoreToEdge) -> None:
        """Give answers to those who wait for them."""
        if message.HasField("load"):
            self._load.answered(message.load)
        if message.HasField("flushed"):
            self._flush.answered(message.flushed)

    def core_lost(self, error: UnavailableError) -> None:
        """Nobody will answer any more."""
        self._is_gone = True
        self._load.failed(error)
        self._flush.failed(error)

    def _check_there(self) -> None:
        if self._is_gone:
            raise UnavailableError("the scheduler core is gone")
