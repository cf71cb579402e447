"""Root-mean-square normalisation."""

from torch import Tensor
from torch.nn import functional


class RmsNorm:
    """x / rms(x) * weight, row by row."""

    def __init__(self, weight: Tensor, *, epsilon: float) -> None:
        self._weight = weight
        self._shape = (len(weight),)
        self._epsilon = epsilon

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> the same shape, owned."""
        return functional.rms_norm(hidden, self._shape, self._weight, self._epsilon)
