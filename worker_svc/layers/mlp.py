"""The gated feed-forward layer."""

from collections.abc import Callable

from torch import Tensor

from worker_svc.numerics import Product


class GatedMlp:
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, *, gate_up: Product, down: Product, gated: Callable[[Tensor], Tensor]) -> None:
        """Put the parts together.

        Args:
            gate_up: both products, one below the other.
            down: back to the hidden size.
            gated: activation(left half) * right half, of the numerics.
        """
        self._gate_up = gate_up
        self._down = down
        self._gated = gated

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> the same shape, owned."""
        return self._down(self._gated(self._gate_up(hidden)))
