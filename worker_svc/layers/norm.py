"""Root-mean-square normalisation."""

import torch
from torch import Tensor
from torch.nn import functional


class RmsNorm:
    """x / rms(x) * weight, row by row, in float32. `dtype` is what the next product takes."""

    def __init__(self, weight: Tensor, *, epsilon: float, dtype: torch.dtype) -> None:
        self._weight = weight
        self._shape = (len(weight),)
        self._epsilon = epsilon
        self._dtype = dtype

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., width of the weight] float32 -> the same shape in `dtype`, owned."""
        return functional.rms_norm(hidden, self._shape, self._weight, self._epsilon).to(self._dtype)
