"""Starts the parts of a process in order, waits for a signal or a failure, and stops them in reverse.

Knows no part. Guards: every part that was started is stopped, each within its time limit, whatever the others do.
"""

import asyncio
import logging
import math
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from protos.service.config import EX_CONFIG
from protos.service.status import fault_border
from protos.wire.errors import CallerError, CannotListen, EngineError, FaultError, InternalFault

logger = logging.getLogger(__name__)

Step = Callable[[], Awaitable[None]]

DEFAULT_STEP_LIMIT_S = 30.0


class ExitCode(IntEnum):
    """How a process ends; the numbers are those of sysexits.h."""

    OK = 0
    FAILURE = 1
    BAD_INPUT = 65
    """A file or setting of the operator cannot be used."""
    CANNOT_LISTEN = 69
    """A port is in use, or an address is not ours."""
    FAULT = 70
    """Something broke: an unexpected error, or a part that did not start or stop in time."""


LASTING = frozenset({EX_CONFIG, ExitCode.BAD_INPUT, ExitCode.CANNOT_LISTEN})
"""The settings, a file or a port is wrong: a new process would end the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that is started and stopped with the process.

    `stop` is also called after a `start` that failed or was abandoned midway, and must release what there is.
    """

    name: str
    start: Step | None = None
    stop: Step | None = None
    start_limit_s: float = DEFAULT_STEP_LIMIT_S
    stop_limit_s: float = DEFAULT_STEP_LIMIT_S


SAME_SIGNAL_S = 0.5
"""Signals closer than this are one order."""


class Lifecycle:
    """One run of one process. Made by `app.py`, used in one event loop, once.

    A first SIGTERM or SIGINT asks for an orderly stop; another one, later than `SAME_SIGNAL_S`, ends the process at
    once. One order often arrives more than once: from a parent and to the group, or from the kernel for each thread of
    a dying parent.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._started: list[Part] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked = asyncio.Event()
        self._code = ExitCode.OK
        self._signalled_at = -math.inf

    def add(self, part: Part) -> None:
        """Start `part` after, and stop it before, those added earlier."""
        self._parts.append(part)

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the parts: cancelled before they stop; if it fails, the process stops with FAULT."""
        task = asyncio.create_task(self._guarded(name, work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def request_stop(self, reason: str, code: ExitCode = ExitCode.OK) -> None:
        """Begin the orderly stop, or do nothing if it has begun; the worst code of all requests is the exit code."""
        if not self._asked.is_set():
            logger.info("stopping", extra={"reason": reason})
        self._code = max(self._code, code)
        self._asked.set()

    async def run(self) -> ExitCode:
        """Start everything, wait until a stop is asked for, stop everything; the code to exit with."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            if await self._start_all():
                await self._asked.wait()
        finally:
            await self._end_tasks()
            await self._stop_all()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        return self._code

    def _on_signal(self, number: signal.Signals) -> None:
        now = asyncio.get_running_loop().time()
        if self._asked.is_set():
            if now - self._signalled_at <= SAME_SIGNAL_S:
                return
            logger.warning("second signal: ending at once", extra={"signal": number.name})
            os._exit(128 + number)
        self._signalled_at = now
        self.request_stop(number.name)

    async def _start_all(self) -> bool:
        """Whether every part runs. A stop that is asked for meanwhile abandons the step under way."""
        for part in self._parts:
            if self._asked.is_set():
                return False
            self._started.append(part)
            if part.start is not None and not await self._start(part, part.start):
                return False
        return True

    async def _start(self, part: Part, start: Step) -> bool:
        step = asyncio.create_task(self._step(part.name, start, part.start_limit_s), name=f"start {part.name}")
        asked = asyncio.create_task(self._asked.wait())
        await asyncio.wait({step, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not step.done():
            step.cancel()
        await asyncio.wait({step, asked})
        return not step.cancelled() and step.result()

    async def _stop_all(self) -> None:
        while self._started:
            part = self._started.pop()
            if part.stop is not None:
                await self._step(part.name, part.stop, part.stop_limit_s)

    async def _step(self, name: str, work: Step, limit_s: float) -> bool:
        """Whether the step was done; if not, the reason is in the log and in the exit code."""
        try:
            async with asyncio.timeout(limit_s):
                with fault_border(name):
                    await work()
        except EngineError as error:
            self._fail(name, error)
            return False
        except TimeoutError:
            self._fail(name, InternalFault(f"{name} took longer than {limit_s} s"))
            return False
        return True

    async def _guarded(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            with fault_border(name):
                await work
        except EngineError as error:
            self._fail(name, error)

    async def _end_tasks(self) -> None:
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _fail(self, name: str, error: EngineError) -> None:
        logger.error("a part failed", extra={"part": name, "reason": error.reason, "error": error.message})
        self.request_stop(f"{name}: {error.reason}", exit_code_of(error))


def exit_code_of(error: EngineError) -> ExitCode:
    """The code of a process that ends because of `error`."""
    if isinstance(error, CannotListen):
        return ExitCode.CANNOT_LISTEN
    if isinstance(error, FaultError):
        return ExitCode.FAULT
    return ExitCode.BAD_INPUT if isinstance(error, CallerError) else ExitCode.FAILURE
