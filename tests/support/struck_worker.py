"""A simulated worker that can be hurt: `python -m tests.support.struck_worker FLAGS…`.

The signal BLOCK stops its event loop and HOLD its whole interpreter, each for BLOCKED_S. A plan with the ids POISON in
a row kills it, as a plan that breaks a driver would.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

import numpy as np

from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from worker_svc.__main__ import main
from worker_svc.simulated.executor import SimulatedExecutor

Stage = Callable[[], ForwardResult]
BLOCK, HOLD = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2
BLOCKED_S = 3.5
POISON = (8190, 8189, 8190, 8189)
_HELD = ctypes.PyDLL(None)
"""Calls through it keep the interpreter's lock."""


def block_loop(number: int, frame: FrameType | None) -> None:
    time.sleep(BLOCKED_S)


def hold_interpreter(number: int, frame: FrameType | None) -> None:
    _HELD.usleep(int(BLOCKED_S * 1e6))


def is_poisoned(plan: ForwardPlan) -> bool:
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(plan.tokens.ids, (0, len(POISON))), len(POISON))
    return bool((windows == POISON).all(axis=1).any())


def dying(execute: Callable[..., Stage]) -> Callable[..., Stage]:
    """`SimulatedExecutor.stage`, whose work kills the process if the plan is poisoned."""

    def stage(executor: SimulatedExecutor, plan: ForwardPlan, digest: bytes | None = None) -> Stage:
        if is_poisoned(plan):
            return die
        return execute(executor, plan, digest)

    return stage


def die() -> ForwardResult:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


if __name__ == "__main__":
    signal.signal(BLOCK, block_loop)
    signal.signal(HOLD, hold_interpreter)
    SimulatedExecutor.stage = dying(SimulatedExecutor.stage)
    sys.exit(main(sys.argv[1:]))
