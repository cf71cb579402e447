"""Which settings the native CPU kernels can be had with. Knows no torch: they are checked before it is loaded."""

from kernels.native_types import PAGE_SIZE
from worker_svc.runners.executor_settings import ExecutorSettings

_OWN_ATTENTION = frozenset({"auto", "native"})


def native_problem(settings: ExecutorSettings) -> str | None:
    """Why the kernels cannot be had with these settings; None: nothing is against it."""
    if settings.device != "cpu":
        return f"the native kernels are for the CPU, device is {settings.device}"
    if settings.dtype != "float32":
        return f"the native kernels compute float32 on quantised weights, dtype is {settings.dtype}"
    if settings.page_size != PAGE_SIZE:
        return f"the native kernels have pages of {PAGE_SIZE} tokens, page_size is {settings.page_size}"
    attention = (settings.prefill_attention, settings.decode_attention)
    other = next((name for name in attention if name not in _OWN_ATTENTION), None)
    return (
        None if other is None else f"the native kernels have their own attention, not {other} (auto, or kernels torch)"
    )
