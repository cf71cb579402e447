"""What the parts of the torch device side are built for: the settings, and what some of their names stand for."""

from dataclasses import dataclass

import torch

from worker_svc.numerics import Numerics
from worker_svc.runners.executor_settings import ExecutorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """Made once at start."""

    executor: ExecutorSettings
    numerics: Numerics
    dtype: torch.dtype
    device: torch.device
    threads: int = 1
    """Of attention that has its own."""
