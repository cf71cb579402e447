"""What settings of a worker contradict each other, found before a model is opened or torch is loaded.

Each group has checked itself already. Guards: what is refused here names the settings, their values and what works.
"""

from protos.wire.errors import UnsupportedFeature
from worker_svc.attention.choice import choose_attention
from worker_svc.config import Device, ExecutorConfig, Kernels, Numerics
from worker_svc.runners.attention_rules import attention_request
from worker_svc.runners.executor_settings import ExecutorSettings, executor_settings
from worker_svc.runners.native_rules import native_problem


def combination_problems(executor: ExecutorConfig) -> list[str]:
    """One line for each contradiction; none for a simulated device, which has no use for these settings."""
    if executor.device is Device.SIMULATED:
        return []
    settings = executor_settings(executor.model_dump(mode="json"), {})
    found = (_numerics_problem(executor), _kernels_problem(executor, settings), _attention_problem(settings))
    return [problem for problem in found if problem is not None]


def _numerics_problem(executor: ExecutorConfig) -> str | None:
    if executor.numerics is Numerics.REPRODUCIBLE and executor.device is not Device.CPU:
        return f"numerics reproducible needs device cpu, it is {executor.device}"
    return None


def _kernels_problem(executor: ExecutorConfig, settings: ExecutorSettings) -> str | None:
    if executor.kernels is not Kernels.NATIVE:
        return None
    if executor.numerics is not Numerics.FAST:
        return f"kernels native compute fast numerics, numerics is {executor.numerics}"
    return native_problem(settings)


def _attention_problem(settings: ExecutorSettings) -> str | None:
    """Of what does not depend on the model or on what is installed."""
    try:
        choose_attention(attention_request(settings), {})
    except UnsupportedFeature as error:
        return error.message
    return None
