"""Which settings the native CPU kernels can be had with. Knows no torch: they are checked before it is loaded."""

from kernels.native_types import PAGE_SIZE

_OWN_ATTENTION = frozenset({"auto", "native"})


def native_problem(*, device: str, dtype: str, page_size: int, attention: tuple[str, str]) -> str | None:
    """Why the kernels cannot be had with these settings; None: nothing is against it.

    Args:
        device: where the model runs.
        dtype: of activations.
        page_size: tokens a page.
        attention: what is asked for, of prefill and of decode.
    """
    if device != "cpu":
        return f"the native kernels are for the CPU, device is {device}"
    if dtype != "float32":
        return f"the native kernels compute float32 on quantised weights, dtype is {dtype}"
    if page_size != PAGE_SIZE:
        return f"the native kernels have pages of {PAGE_SIZE} tokens, page_size is {page_size}"
    other = next((name for name in attention if name not in _OWN_ATTENTION), None)
    return None if other is None else f"the native kernels have their own attention, not {other}"
