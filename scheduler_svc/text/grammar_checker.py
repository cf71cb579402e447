"""Whether a grammar can be used at all, tried out in a process of its own before anything else is spent on it.

Knows nothing of requests. Guards: a grammar that takes too much ends only that process; verdicts are remembered, up to
so many.
"""

import asyncio
import hashlib
import itertools
from collections import OrderedDict
from dataclasses import replace

from protos.wire.errors import CallerError, EngineError, QueueFull
from scheduler_svc.text.grammar_lane import GrammarLane, MaskAnswer, MaskQuestion, RowKey
from scheduler_svc.text.grammar_messages import Greeting
from scheduler_svc.text.grammar_source import GrammarSource

_MAX_VERDICTS = 4096
_MAX_WAITING = 64
_RETRY_AFTER_MS = 1000
_NICENESS = 5
"""Nobody's next token waits for it: a hostile compile leaves most of a busy processor to those that decode."""


class GrammarChecker:
    """Made by a composition root, used on one event loop."""

    def __init__(self, greeting: Greeting) -> None:
        self._lane = GrammarLane(replace(greeting, niceness=_NICENESS), answered=self._answered)
        self._rows = itertools.count()
        self._waiters: dict[RowKey, asyncio.Future[EngineError | None]] = {}
        self._verdicts: OrderedDict[bytes, CallerError | None] = OrderedDict()
        self._running: asyncio.Task[None] | None = None

    async def check(self, source: GrammarSource) -> None:
        """Return if masks can be made of it.

        Raises:
            InvalidRequest: it does not compile, or takes too much.
            QueueFull: too many wait to be tried out.
            EngineError: no process can be had.
        """
        key = hashlib.sha256(f"{source.kind} {source.text}".encode()).digest()
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            verdict: EngineError | None = self._verdicts[key]
        else:
            verdict = await self._try_out(source)
            if verdict is None or isinstance(verdict, CallerError):
                self._remember(key, verdict)
        if verdict is not None:
            raise type(verdict)(verdict.message, field=verdict.field, retry_after_ms=verdict.retry_after_ms)

    async def start(self) -> None:
        """Take checks from now on; the process starts with the first of them."""
        self._running = asyncio.create_task(self._lane.run(), name="grammar checks")

    async def stop(self) -> None:
        """End the process. Safe to repeat."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def _try_out(self, source: GrammarSource) -> EngineError | None:
        if len(self._waiters) >= _MAX_WAITING:
            message = f"{len(self._waiters)} grammars wait to be compiled, which is the limit"
            raise QueueFull(message, field=source.kind, retry_after_ms=_RETRY_AFTER_MS)
        row = (0, next(self._rows))
        waiter: asyncio.Future[EngineError | None] = asyncio.get_running_loop().create_future()
        self._waiters[row] = waiter
        self._lane.ask(MaskQuestion(row, source, ()))
        try:
            return await waiter
        finally:
            del self._waiters[row]
            self._lane.forget(row)

    def _answered(self, answer: MaskAnswer) -> None:
        waiter = self._waiters.get(answer.row)
        if waiter is not None and not waiter.done():
            waiter.set_result(answer.answer if isinstance(answer.answer, EngineError) else None)

    def _remember(self, key: bytes, verdict: CallerError | None) -> None:
        self._verdicts[key] = verdict
        if len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)
