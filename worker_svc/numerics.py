"""How sums are ordered: numerics as strategy objects, chosen once at start.

`ReproducibleNumerics`: a row's result has the same bits whatever shares its batch. `FastNumerics`: torch's own choice.
Layers are given one and never ask which. Knows nothing of models or attention code.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from protos.wire.errors import UnsupportedFeature

CHECKED_ROWS = (1, 2, 3, 5, 7, 12, 17, 64)
"""Row counts whose results must agree before reproducible numerics are promised."""
ROW_MULTIPLE = 16
"""Rows of every reproducible product are a multiple of this: below 12 rows torch sums in another order."""
_GELU_SLOPE, _GELU_CUBE = (2 / math.pi) ** 0.5, 0.044715
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

    def gated_gelu(self, gate_up: Tensor) -> Tensor:
        """gelu(left half) * right half of [n, 2 * width], gelu in its tanh form."""
        ...

    def check_norm(self, width: int) -> None:
        """Prove that norms of rows of this width keep the promise.

        Raises:
            UnsupportedFeature: they do not, on this CPU.
        """
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


def check_rows(operation: Callable[[Tensor], Tensor], *, width: int, what: str) -> None:
    """Refuse a CPU on which a row's result depends on how many rows are computed with it, or on its place.

    Args:
        operation: works on rows [n, width] float32, each on its own.
        width: of the rows.
        what: names the operation in the refusal.

    Raises:
        UnsupportedFeature: the results differ; says for how many rows.
    """
    rows = torch.randn(max(CHECKED_ROWS), width, generator=torch.Generator().manual_seed(0))
    known = operation(rows)
    for count in CHECKED_ROWS:
        if not torch.equal(operation(rows[-count:].clone()), known[-count:]):
            message = f"on this CPU {what} gives other bits for {count} rows than for {len(rows)}: use numerics fast"
            raise UnsupportedFeature(message, field="numerics")


class ReproducibleNumerics:
    """Bit-equal rows in any batch, float32 only. Each operation is checked on this CPU when it is made."""

    name = "reproducible"
    attention = "tiled"

    def __init__(self) -> None:
        self._checked: set[tuple[int, int]] = set()
        self._checked_norms: set[int] = set()
        check_rows(self.gated_silu, width=2 * 96, what="the gated activation")
        check_rows(self.gated_gelu, width=2 * 96, what="the gated activation")

    def product(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """See `Numerics.product`.

        Raises:
            UnsupportedFeature: on this CPU a row's result depends on the other rows.
        """
        product = PaddedProduct(weight, bias)
        outputs, width = weight.shape
        if (outputs, width) not in self._checked:
            check_rows(product, width=width, what=f"a product with a matrix of {outputs} x {width}")
            self.check_norm(width)
            self._checked.add((outputs, width))
        return product

    def check_norm(self, width: int) -> None:
        """See `Numerics.check_norm`."""
        if width not in self._checked_norms:
            check_rows(lambda rows: functional.rms_norm(rows, (width,)), width=width, what="normalisation")
            self._checked_norms.add(width)

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        """See `Numerics.gated_silu`. Not torch's silu: its vector and scalar paths round differently."""
        gate, up = gate_up.chunk(2, dim=-1)
        return gate.neg().exp_().add_(1).reciprocal_().mul_(gate).mul_(up)

    def gated_gelu(self, gate_up: Tensor) -> Tensor:
        """See `Numerics.gated_gelu`. By exp alone, for the same reason: x * (1 + tanh(u)) / 2 = x / (1 + exp(-2u))."""
        gate, up = gate_up.chunk(2, dim=-1)
        bent = (gate * gate).mul_(_GELU_CUBE).add_(1).mul_(gate).mul_(-2 * _GELU_SLOPE)
        return bent.exp_().add_(1).reciprocal_().mul_(gate).mul_(up)


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

    def gated_gelu(self, gate_up: Tensor) -> Tensor:
        """See `Numerics.gated_gelu`."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh").mul_(up).to(gate_up.dtype)

    def check_norm(self, width: int) -> None:
        """See `Numerics.check_norm`: nothing was promised."""


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
