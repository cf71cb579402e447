"""How much a plan may carry where nobody said: the step time aimed at and the range of prefill tokens, by device.

The scheduler plans by it and capacity planning predicts by it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepBudget:
    """What one kind of device gets."""

    target_step_s: float
    """Device time that a plan may take."""
    least_tokens: int
    """Prefill tokens of a plan, however slow the device is."""
    most_tokens: int
    """However fast it is."""


CPU_BUDGET = StepBudget(0.25, 64, 2048)
GPU_BUDGET = StepBudget(0.05, 256, 8192)


def is_cpu(device: str) -> bool:
    """Whether a worker that says this of its device, as `cpu` or `cuda:0`, computes on a CPU."""
    return device.startswith("cpu")


def step_budget(device: str) -> StepBudget:
    """What a worker on that device gets."""
    return CPU_BUDGET if is_cpu(device) else GPU_BUDGET


def whole_pages(tokens: float, *, least: int, most: int, page_size: int) -> int:
    """`tokens` held between the two, then whole pages of it, at least one."""
    return max(int(min(max(tokens, least), most)) // page_size, 1) * page_size
