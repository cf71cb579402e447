"""The one thread that may touch the device. It takes work from a short queue and hands results to the event loop.

Knows neither plans nor executors. It waits without polling and, being a daemon, never keeps a dying process alive.
Work may be *offered*: it begins the moment the running work ends well, without a turn of the event loop between.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from protos.service.status import fault_border
from protos.wire.errors import EngineError

ResultT = TypeVar("ResultT")

_MAX_JOBS = 4
"""Load, plan, reset, close: the protocol never has more than one of each out."""


class DeviceJob(Generic[ResultT]):
    """Work for the device thread and, later, its outcome. Made by `DeviceThread` in the event loop."""

    def __init__(self, work: Callable[[], ResultT]) -> None:
        self.work = work
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[ResultT] = self._loop.create_future()
        self._settle: Callable[[], None] | None = None

    def run(self) -> bool:
        """On the device thread: do the work; False if it failed."""
        try:
            with fault_border("device thread"):
                outcome = self.work()
        except EngineError as error:
            fault = error  # the name of an except clause does not outlive it
            self._settle = lambda: self.future.set_exception(fault)
            return False
        self._settle = lambda: self.future.set_result(outcome)
        return True

    def tell(self) -> None:
        """On the device thread, after `run`: let the loop settle the future."""
        # A closed loop has nobody left who waits.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.settle)

    def settle(self) -> None:
        """In the event loop: give the future its outcome, if the work has ended and nobody did before."""
        if self._settle is not None and not self.future.done():
            self._settle()


class DeviceThread:
    """Made and used by one event loop; started at construction, ended by `stop`."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[DeviceJob[Any]] = queue.Queue(maxsize=_MAX_JOBS)
        self._offer_lock = threading.Lock()
        self._offered: DeviceJob[Any] | None = None
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], ResultT]) -> "asyncio.Future[ResultT]":
        """Run `work` behind everything submitted before.

        The future fails with what `work` raised of the taxonomy; anything else is logged and becomes InternalFault.
        """
        return self.start(work).future

    def start(self, work: Callable[[], ResultT]) -> DeviceJob[ResultT]:
        """As `submit`, for a caller that may have to look at the outcome before the loop's next turn."""
        job = DeviceJob(work)
        self._jobs.put_nowait(job)
        return job

    def offer(self, work: Callable[[], ResultT]) -> DeviceJob[ResultT]:
        """Let `work` begin when the work that runs now ends well. One offer at a time."""
        job = DeviceJob(work)
        with self._offer_lock:
            assert self._offered is None
            self._offered = job
        return job

    def withdraw(self, job: DeviceJob[Any]) -> bool:
        """Take an offer back; False if it has begun: then the work before it has its outcome."""
        with self._offer_lock:
            if self._offered is not job:
                return False
            self._offered = None
            return True

    def insist(self, job: DeviceJob[Any]) -> None:
        """Turn an offer into submitted work; one that has begun is left to run."""
        if self.withdraw(job):
            self._jobs.put_nowait(job)

    async def stop(self) -> None:
        """End the thread behind the work it has, and wait for that."""
        await self.submit(_end)

    def _serve(self) -> None:
        job: DeviceJob[Any] | None = None
        is_ended = False
        while not is_ended:
            job = job or self._jobs.get()
            following = self._take_offer() if job.run() else None
            job.tell()
            is_ended = job.work is _end
            job = following

    def _take_offer(self) -> DeviceJob[Any] | None:
        with self._offer_lock:
            job, self._offered = self._offered, None
            return job


def _end() -> None:
    """The last job."""
