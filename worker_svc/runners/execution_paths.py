"""How a device side runs plans: its runners in dispatch's order, and what is still to be captured."""

from dataclasses import dataclass

from worker_svc.executor import Captures
from worker_svc.runners.base import ForwardRunner
from worker_svc.runners.dispatch import RunnerDispatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionPaths:
    """Made by a stack, used by the worker."""

    dispatch: RunnerDispatch
    captures: Captures | None = None


def one_path(runner: ForwardRunner) -> ExecutionPaths:
    """Every batch goes to `runner`."""
    return ExecutionPaths(dispatch=RunnerDispatch((runner,)))
