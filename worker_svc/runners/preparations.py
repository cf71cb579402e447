"""Host work that captures need done before, on a thread of its own: the device serves meanwhile, one piece at a time.

Knows neither buckets nor graphs. The thread is a daemon of low priority: it never keeps a worker from ending, and takes
what time serving leaves.
"""

import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from protos.wire.errors import EngineError
from worker_svc.device.device_graph import CaptureError
from worker_svc.executor import PREPARATION_THREAD
from worker_svc.graph_backends.base import Preparation

KeyT = TypeVar("KeyT", bound=Hashable)

_NICENESS = 10
FAILURES = (CaptureError, EngineError, RuntimeError)
"""torch tells of a device without memory, or of an operator that it cannot run, by RuntimeError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Generic[KeyT]):
    """One that has ended."""

    key: KeyT
    nanoseconds: int
    problem: Exception | None
    """Why it failed; None if it did not."""


class Preparations(Generic[KeyT]):
    """Used by the device thread."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._is_running = False
        self._ended: Prepared[KeyT] | None = None

    @property
    def is_running(self) -> bool:
        """Whether one was started whose end was not taken."""
        return self._is_running

    def start(self, key: KeyT, work: Preparation) -> None:
        """Begin one. None runs."""
        assert not self._is_running
        self._is_running = True
        threading.Thread(target=self._run, args=(key, work), name=PREPARATION_THREAD, daemon=True).start()

    def take_ended(self) -> Prepared[KeyT] | None:
        """The one that has ended since the last call."""
        ended = self._ended
        if ended is not None:
            self._ended, self._is_running = None, False
        return ended

    def _run(self, key: KeyT, work: Preparation) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        begin = self._clock_ns()
        problem: Exception | None = CaptureError("the preparation broke off")
        try:
            work()
            problem = None
        except FAILURES as error:
            problem = error
        finally:  # also behind a bug, which the thread's own end reports
            self._ended = Prepared(key=key, nanoseconds=self._clock_ns() - begin, problem=problem)
