"""How sums are ordered: numerics as strategy objects, chosen once at start.

`ReproducibleNumerics`: a row's result has the same bits whatever shares its batch. `FastNumerics`: torch's own choice.
Layers are given one and never ask which. Knows nothing of models or attention code.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from protos.wire.errors import UnsupportedFeature

ROW_MULTIPLE = 16
"""Rows of every reproducible product are a multiple of this: below 12 rows torch sums in another order."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Product(Protocol):
    """x -> x @ weight.T + bias."""

    def __call__(self, rows: Tensor) -> Tensor:
        """[n, inputs] -> [n, outputs], owned."""
        ...


class Numerics(Protocol):
    """Operations whose result may depend on how many rows they see."""

    @property
    def name(self) -> str:
        """As in the setting."""
        ...

    @property
    def attention(self) -> str:
        """Name of the attention back-end that keeps the promise."""
        ...

    def product(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """A linear product over `weight` [outputs, inputs], kept. The bias may have another dtype than the weight."""
        ...

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        """silu(left half) * right half of [n, 2 * width]."""
        ...


class PaddedProduct:
    """Pads rows to a multiple of 16, so that every row is summed in the same order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """See `Product`."""
        count = len(rows)
        missing = -count % ROW_MULTIPLE
        if missing:
            rows = torch.cat((rows, rows.new_zeros(missing, rows.shape[1])))
        return functional.linear(rows, self._weight, self._bias)[:count]


class PlainProduct:
    """torch's linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.to(weight.dtype)

    def __call__(self, rows: Tensor) -> Tensor:
        """See `Product`."""
        return functional.linear(rows, self._weight, self._bias)


class ReproducibleNumerics:
    """Bit-equal rows in any batch, on a CPU that passed `self_check`. float32 only."""

    name = "reproducible"
    attention = "tiled"

    def product(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """See `Numerics.product`."""
        return PaddedProduct(weight, bias)

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        """See `Numerics.gated_silu`. Not torch's silu: its vector and scalar paths round differently."""
        gate, up = gate_up.chunk(2, dim=-1)
        return gate.neg().exp_().add_(1).reciprocal_().mul_(gate).mul_(up)


class FastNumerics:
    """torch's operators as they come."""

    name = "fast"
    attention = "torch"

    def product(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """See `Numerics.product`."""
        return PlainProduct(weight, bias)

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        """See `Numerics.gated_silu`."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return functional.silu(gate).mul_(up).to(gate_up.dtype)


def numerics_by_name(name: str, *, dtype: torch.dtype, device: torch.device) -> Numerics:
    """The strategy of that name.

    Raises:
        UnsupportedFeature: unknown, or it cannot keep its promise with this dtype or device.
    """
    if name == FastNumerics.name:
        return FastNumerics()
    if name != ReproducibleNumerics.name:
        raise UnsupportedFeature(f"numerics is {name!r}, known: fast, reproducible", field="numerics")
    if dtype != torch.float32:
        given = str(dtype).removeprefix("torch.")
        raise UnsupportedFeature(f"reproducible numerics need dtype float32, it is {given}", field="dtype")
    if device.type != "cpu":
        raise UnsupportedFeature(f"reproducible numerics need device cpu, it is {device.type}", field="device")
    return ReproducibleNumerics()
