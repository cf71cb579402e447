"""Whether this machine has a GPU that torch can use."""

import torch


def why_no_gpu() -> str | None:
    """Why device `cuda` cannot be had; None: it can."""
    if torch.version.cuda is None:
        return f"no CUDA device: the installed torch, {torch.__version__}, is built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device is found"
    return None
