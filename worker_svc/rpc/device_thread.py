"""The one thread that may touch the device. It takes work from a short queue and hands results to the event loop.

Knows neither plans nor executors. It waits without polling and, being a daemon, never keeps a dying process alive.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from protos.service.status import fault_border
from protos.wire.errors import EngineError

ResultT = TypeVar("ResultT")

_MAX_JOBS = 4
"""Load, plan, reset, close: the protocol never has more than one of each out."""


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], Any]
    future: "asyncio.Future[Any]"
    loop: asyncio.AbstractEventLoop


class DeviceThread:
    """Made and used by one event loop; started at construction, ended by `stop`."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[_Job] = queue.Queue(maxsize=_MAX_JOBS)
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], ResultT]) -> "asyncio.Future[ResultT]":
        """Run `work` behind everything submitted before.

        The future fails with what `work` raised of the taxonomy; anything else is logged and becomes InternalFault.
        """
        return self._put(work)

    async def stop(self) -> None:
        """End the thread behind the work it has, and wait for that."""
        await self._put(_end)

    def _put(self, work: Callable[[], ResultT]) -> "asyncio.Future[ResultT]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ResultT] = loop.create_future()
        self._jobs.put_nowait(_Job(work, future, loop))
        return future

    def _serve(self) -> None:
        is_ended = False
        while not is_ended:
            job = self._jobs.get()
            try:
                with fault_border("device thread"):
                    outcome = job.work()
            except EngineError as error:
                _tell(job, job.future.set_exception, error)
            else:
                _tell(job, job.future.set_result, outcome)
            is_ended = job.work is _end


def _end() -> None:
    """The last job."""


def _tell(job: _Job, settle: Callable[[Any], None], value: Any) -> None:
    # A closed loop has nobody left who waits.
    if not job.loop.is_closed():
        job.loop.call_soon_threadsafe(_settle, job.future, settle, value)


def _settle(future: "asyncio.Future[Any]", settle: Callable[[Any], None], value: Any) -> None:
    if not future.done():
        settle(value)
