"""Ends a process whose device hangs, with or without the interpreter's help. Knows neither plans nor executors.

Two guards. A thread looks twice a second: at half of the budget of what runs it writes every thread's stack once, two
seconds past the budget it ends the process. If the interpreter itself is held (a call that keeps its lock), that thread
does not run; then a timer of `faulthandler`, a native thread that each look winds up again, writes the stacks and
ends the process. Neither is a graceful path: that could hang as well. The scheduler has given the worker up by then.
"""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from protos.service.lifecycle import ExitCode
from worker_svc.rpc.device_work import DeviceProgress

_logger = logging.getLogger(__name__)

LOOK_S = 0.5
SOFT_SHARE = 0.5
"""Of the budget."""
HARD_MARGIN_S = 2.0
UNBUDGETED_S = 60.0
"""For work that names no budget, and for an idle interpreter."""


class Verdict(Enum):
    """What a look at the device says."""

    FINE = auto()
    LATE = auto()
    HUNG = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogLimits:
    """How long is too long."""

    look_s: float = LOOK_S
    hard_margin_s: float = HARD_MARGIN_S
    unbudgeted_s: float = UNBUDGETED_S

    def budget_s(self, progress: DeviceProgress) -> float:
        """For what runs, or would run."""
        has_budget = progress.is_busy and progress.budget_ms > 0
        return progress.budget_ms / 1000 if has_budget else self.unbudgeted_s

    def verdict(self, progress: DeviceProgress, now_ns: int) -> Verdict:
        """Of the work that the device is at."""
        if not progress.is_busy:
            return Verdict.FINE
        busy_s, budget_s = (now_ns - progress.since_ns) / 1e9, self.budget_s(progress)
        if busy_s >= budget_s + self.hard_margin_s:
            return Verdict.HUNG
        return Verdict.LATE if busy_s >= SOFT_SHARE * budget_s else Verdict.FINE

    def alarm_s(self, progress: DeviceProgress) -> float:
        """How long the interpreter may be held from now on."""
        return self.budget_s(progress) + self.hard_margin_s


class DeviceWatchdog:
    """One per loaded worker, from `start` to `stop`."""

    def __init__(self, progress: Callable[[], DeviceProgress], limits: WatchdogLimits | None = None) -> None:
        self._progress = progress
        self._limits = limits or WatchdogLimits()
        self._is_stopping = threading.Event()
        self._told_of_ns = -1
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Watch from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more; waits for a look that is under way."""
        self._is_stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_stopping.is_set():
            self._look()
            self._is_stopping.wait(self._limits.look_s)
        faulthandler.cancel_dump_traceback_later()

    def _look(self) -> None:
        progress = self._progress()
        faulthandler.dump_traceback_later(self._limits.alarm_s(progress), exit=True, file=sys.__stderr__)
        verdict = self._limits.verdict(progress, time.monotonic_ns())
        if verdict is Verdict.FINE or (verdict is Verdict.LATE and self._told_of_ns == progress.since_ns):
            return
        self._told_of_ns = progress.since_ns
        extra = {"seq": progress.last_started_seq, "budget_ms": progress.budget_ms}
        if verdict is Verdict.LATE:
            _logger.warning("the device is late, all stacks follow", extra=extra)
            faulthandler.dump_traceback(file=sys.__stderr__)
            return
        _logger.error("the device hangs, the process ends", extra=extra)
        faulthandler.dump_traceback(file=sys.__stderr__)
        os._exit(ExitCode.FAULT)
