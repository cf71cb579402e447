"""What an edge asks the core beside its streams.

Load and flush: one question of a kind at a time, one answer for all who ask it. Aborts: one question each.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from protos.forwardplane.v1.bridge_pb2 import AbortOrder, CoreToEdge
from protos.forwardplane.v1.generate_pb2 import FlushCacheReply, GetLoadReply
from protos.wire.errors import UnavailableError
from scheduler_svc.edge.caller_identity import CallerIdentity

_TIMEOUT_S = 5.0

AnswerT = TypeVar("AnswerT")


class Asking(Protocol):
    """What is needed of the bridge's client."""

    def ask_load(self) -> None:
        """Ask for a load snapshot."""
        ...

    def ask_flush(self) -> None:
        """Ask to empty the prefix caches."""
        ...

    def ask_abort(self, order: AbortOrder) -> None:
        """Have another edge end a request."""
        ...


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

    def __init__(self, ask: Asking) -> None:
        self._ask = ask
        self._load: _Question[GetLoadReply] = _Question(ask.ask_load)
        self._flush: _Question[FlushCacheReply] = _Question(ask.ask_flush)
        self._aborts: dict[int, asyncio.Future[bool]] = {}
        self._next_question = itertools.count(1)
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

    async def abort_elsewhere(self, request_id: str, caller: CallerIdentity) -> bool:
        """End a request that another edge has; whether there was one of this caller.

        Raises:
            UnavailableError: the core is gone, or it or that edge does not answer.
        """
        self._check_there()
        question = next(self._next_question)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._aborts[question] = answer
        self._ask.ask_abort(AbortOrder(question=question, request_id=request_id, caller=caller.name))
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await answer
        except TimeoutError as error:
            raise UnavailableError("the scheduler core does not answer") from error
        finally:
            del self._aborts[question]

    def take(self, message: CoreToEdge) -> None:
        """Give answers to those who wait for them."""
        if message.HasField("load"):
            self._load.answered(message.load)
        if message.HasField("flushed"):
            self._flush.answered(message.flushed)
        for said in message.abort_answers:
            answer = self._aborts.get(said.question)
            if answer is not None and not answer.done():
                answer.set_result(said.found)

    def core_lost(self, error: UnavailableError) -> None:
        """Nobody will answer any more."""
        self._is_gone = True
        self._load.failed(error)
        self._flush.failed(error)
        for answer in self._aborts.values():
            if not answer.done():
                answer.set_exception(error)

    def _check_there(self) -> None:
        if self._is_gone:
            raise UnavailableError("the scheduler core is gone")
