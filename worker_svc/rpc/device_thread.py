"""The one thread that may touch the device. It takes work from a short queue and hands results to the event loop.

Knows neither plans nor executors. It waits without polling, unless spare work is prepared elsewhere, and, being a
daemon, never keeps a dying process alive.
Work may be *offered*: it begins the moment the running work ends well, without a turn of the event loop between.
*Spare* work runs when there is time, piece by piece: at most one between two jobs that wait.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from protos.service.status import fault_border
from protos.wire.errors import EngineError
from worker_svc.executor import DEVICE_THREAD

ResultT = TypeVar("ResultT")

_MAX_JOBS = 4
"""Load, plan, reset, close: the protocol never has more than one of each out."""
SHORT_PIECE_MS = 100.0
"""Longer pieces of spare work wait until the device is idle."""
IDLE_S = 0.05
"""Without a job for so long, the device is idle: a caller whose tokens stream has sent the next plan long before."""


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


class SpareWork(Protocol):
    """Work that is done when there is time. Called on the device thread."""

    @property
    def max_wait_s(self) -> float:
        """How long a long piece waits for an idle device."""
        ...

    def next_piece_ms(self, *, is_idle: bool) -> float | None:
        """About how long the next piece takes; None: there is nothing to do now."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether nothing is left; False beside no next piece: it is prepared elsewhere, and worth another look."""
        ...

    def run(self, give_way: Callable[[float], None], *, is_idle: bool) -> None:
        """Do the next stretch. `give_way` is called between its pieces with the length of the next one, in ms.

        Jobs run inside `give_way`. What it raises must pass, with the stretch given up.
        """
        ...


class _SpareEnded(BaseException):
    """Spare work is not wanted any more. No error: nothing on its way may catch it as one."""


class DeviceThread:
    """Made and used by one event loop; started at construction, ended by `stop`."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[DeviceJob[Any]] = queue.Queue(maxsize=_MAX_JOBS)
        self._offer_lock = threading.Lock()
        self._offered: DeviceJob[Any] | None = None
        self._following: DeviceJob[Any] | None = None
        """Taken, to run next."""
        self._spare: SpareWork | None = None
        self._is_spare_wanted = True
        self._last_job_at = 0.0
        self._is_ended = False
        self._thread = threading.Thread(target=self._serve, name=DEVICE_THREAD, daemon=True)
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

    def set_spare(self, spare: SpareWork) -> None:
        """Do `spare` from now on when there is time. On the device thread, from a job."""
        self._spare = spare

    def end_spare(self) -> None:
        """No more spare work: what of it has begun is given up before the next job. Any thread; for good."""
        self._is_spare_wanted = False

    async def stop(self) -> None:
        """End the thread behind the work it has, and wait for that."""
        self.end_spare()
        await self.submit(_end)

    # --- on the device thread

    def _serve(self) -> None:
        while not self._is_ended:
            if self._did_spare():
                continue
            job = self._taken() or self._next_job()
            if job is not None:
                self._run(job)

    def _run(self, job: DeviceJob[Any]) -> None:
        following = self._take_offer() if job.run() else None
        job.tell()
        self._following = following
        self._is_ended = job.work is _end
        self._last_job_at = time.monotonic()

    def _taken(self) -> DeviceJob[Any] | None:
        job, self._following = self._following, None
        return job

    def _did_spare(self) -> bool:
        """Whether there was spare work to think of; False: only jobs are left to wait for."""
        if self._spare is None or not self._is_spare_wanted:
            return False
        is_idle = self._is_idle()
        piece_ms = self._spare.next_piece_ms(is_idle=is_idle)
        if piece_ms is None:
            if self._spare.is_done:
                self._spare = None
            return False
        try:
            with fault_border("spare device work"):
                self._give_way(piece_ms)
                self._spare.run(self._give_way, is_idle=self._is_idle())
        except EngineError:
            self._spare = None  # a bug, and in the log; what is served does not depend on it
        except _SpareEnded:
            return False
        return True

    def _next_job(self) -> DeviceJob[Any] | None:
        """Wait for a job; None: it is time to look at the spare work again."""
        if self._spare is None or not self._is_spare_wanted:
            return self._jobs.get()
        return self._waiting(IDLE_S)

    def _is_idle(self) -> bool:
        return time.monotonic() - self._last_job_at >= IDLE_S

    def _give_way(self, piece_ms: float) -> None:
        """Return when a piece of spare work may run. Jobs that wait run first, one of them before a short piece."""
        assert self._spare is not None
        is_short = piece_ms <= SHORT_PIECE_MS
        latest = time.monotonic() + self._spare.max_wait_s
        while True:
            job = self._waiting(0.0 if is_short else IDLE_S)
            if not self._is_spare_wanted:
                self._following = job
                raise _SpareEnded
            if job is None:
                return
            self._run(job)
            if is_short or time.monotonic() >= latest:
                return

    def _waiting(self, timeout_s: float) -> DeviceJob[Any] | None:
        """The next job, if there is one within the time."""
        job = self._taken()
        if job is not None:
            return job
        try:
            return self._jobs.get(timeout=timeout_s) if timeout_s else self._jobs.get_nowait()
        except queue.Empty:
            return None

    def _take_offer(self) -> DeviceJob[Any] | None:
        with self._offer_lock:
            job, self._offered = self._offered, None
            return job


def _end() -> None:
    """The last job."""
