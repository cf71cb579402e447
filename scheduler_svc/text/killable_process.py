"""One child process for work that may run away: answers are awaited with a time limit, and a late child is killed.

Knows nothing of the work. A child costs nothing while idle (it blocks on its pipe) and ends when its pipe closes.
"""

import asyncio
import contextlib
import struct
import sys

from protos.wire.errors import InternalFault

LENGTH = struct.Struct("<I")
"""Both directions carry frames: a little-endian length, then that many bytes."""

_MAX_ANSWER_BYTES = 64 << 20


class ChildKilled(Exception):
    """The child did not answer in time, or died. It will be started anew for the next call."""


class KillableProcess:
    """Made and closed by a composition root, used on one event loop. One call runs at a time; others wait."""

    def __init__(self, module: str, *, greeting: bytes, start_timeout_s: float = 20.0) -> None:
        """Name the child; nothing is started yet.

        Args:
            module: run as `python -m module`.
            greeting: the first frame to each new child, whose answer is awaited before it is used.
            start_timeout_s: most seconds until that answer.
        """
        self._module = module
        self._greeting = greeting
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def start(self) -> bytes:
        """Start a child if there is none; its answer to the greeting, empty if it was there already.

        Raises:
            ChildKilled: it did not come up.
        """
        async with self._lock:
            return await self._ensure()

    async def call(self, request: bytes, *, timeout_s: float) -> bytes:
        """The child's answer.

        Raises:
            ChildKilled: no answer within `timeout_s`, or the child died.
        """
        async with self._lock:
            await self._ensure()
            return await self._exchange(request, timeout_s=timeout_s)

    async def close(self) -> None:
        """End the child. Safe to repeat."""
        async with self._lock:
            await self._kill()

    @property
    def pid(self) -> int | None:
        """Of the running child."""
        return self._process.pid if self._process is not None else None

    async def _ensure(self) -> bytes:
        if self._process is not None and self._process.returncode is None:
            return b""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_ANSWER_BYTES,
        )
        return await self._exchange(self._greeting, timeout_s=self._start_timeout_s)

    async def _exchange(self, request: bytes, *, timeout_s: float) -> bytes:
        is_answered = False
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._ask(request)
            is_answered = True
            return answer
        except TimeoutError as error:
            message = f"no answer within {timeout_s} s"
            raise ChildKilled(message) from error
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise ChildKilled("the child died") from error
        finally:
            # Whatever ended this early, a cancelled caller included, leaves an answer that nobody awaits.
            if not is_answered:
                await self._kill()

    async def _ask(self, request: bytes) -> bytes:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise InternalFault("a child process has no pipes")
        process.stdin.write(LENGTH.pack(len(request)) + request)
        await process.stdin.drain()
        (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        return await process.stdout.readexactly(length)

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
