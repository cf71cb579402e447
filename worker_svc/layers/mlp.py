"""The gated feed-forward layer."""

from torch import Tensor

from worker_svc.numerics import Numerics, Product


class GatedMlp:
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, *, gate_up: Product, down: Product, numerics: Numerics) -> None:
        self._gate_up = gate_up
        self._down = down
        self._numerics = numerics

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> the same shape, owned."""
        return self._down(self._numerics.gated_silu(self._gate_up(hidden)))
