"""What the tape knows about torch's operators: which cannot be replayed, and which variant writes where it is told.

Knows nothing of captures and memory.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten

_REFUSED_TAGS = {
    torch.Tag.data_dependent_output: "hands a value of the device to the host",
    torch.Tag.dynamic_output_shape: "gives a shape that depends on values",
    torch.Tag.nondeterministic_seeded: "draws from the host's random generator",
}
_HOST_DATA = "brings data of the host that a replay would not read again"
_HOST_OPERATORS = {
    aten.lift_fresh.default: _HOST_DATA,
    aten.lift_fresh_copy.default: _HOST_DATA,
    aten.is_pinned.default: "asks the host about memory",
}
_EMPTY = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
_FACTORY = ("dtype", "layout", "device", "pin_memory")
_FILLING = frozenset({aten.full.out, aten.zeros.out, aten.ones.out})
"""Written for all devices at once, like generated ones, but they fill what they are given."""
_INDEXED = frozenset({aten.index.Tensor, aten._unsafe_index.Tensor})
_MASKS = (torch.bool, torch.uint8)

REFUSED_METHODS = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr})
"""Not operators, so not seen as such: how tensors leave for the host."""


def why_not_recorded(operator: OpOverload, arguments: Sequence[Any]) -> str | None:
    """What makes a replay of this call impossible; None if nothing does."""
    if operator in _HOST_OPERATORS:
        return _HOST_OPERATORS[operator]
    if operator in _INDEXED:
        has_mask = any(isinstance(index, Tensor) and index.dtype in _MASKS for index in arguments[1])
        return _REFUSED_TAGS[torch.Tag.dynamic_output_shape] if has_mask else None
    return next((why for tag, why in _REFUSED_TAGS.items() if tag in operator.tags), None)


def makes_nothing_but_space(operator: OpOverload) -> bool:
    """Whether its result has no values to replay."""
    return operator in _EMPTY


def copies(operator: OpOverload) -> bool:
    """Whether all it does is copy its first argument into its result."""
    return operator in (aten.clone.default, aten._to_copy.default)


def simpler(operator: OpOverload, arguments: Sequence[Any]) -> tuple[OpOverload, tuple[Any, ...]]:
    """The same result by an operator that can write where it is told; the call itself if there is none."""
    if operator is aten.embedding.default and arguments[1].dim() == 1:
        return aten.index_select.default, (arguments[0], 0, arguments[1])
    return operator, tuple(arguments)


@cache
def out_variant(operator: OpOverload) -> tuple[OpOverload, tuple[str, ...]] | None:
    """The overload that writes results where it is told without a storage of its own, and the names of its results.

    Overloads that torch generated make a result and copy it: they are no better than doing so here, and do not count.
    """
    wanted = _inputs(operator)
    packet = operator._overloadpacket
    for candidate in (getattr(packet, name) for name in packet.overloads()):
        outs = tuple(argument.name for argument in candidate._schema.arguments if argument.is_out)
        if not outs or len(outs) != len(operator._schema.returns):
            continue
        # Out variants of factories lack dtype and device, which the result itself says.
        if _inputs(candidate) in (wanted, wanted[: -len(_FACTORY)]) and _writes_where_told(candidate):
            return candidate, outs
    return None


def _inputs(operator: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in operator._schema.arguments if not argument.is_out]


def _writes_where_told(operator: OpOverload) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    is_generated = has_kernel(operator.name(), "CompositeExplicitAutograd")
    return operator in _FILLING or (has_kernel(operator.name(), "CPU") and not is_generated)


def tensors_of(values: Any) -> Iterator[Tensor]:
    """The tensors in an operator's arguments or results, which nest lists and tuples."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_of(value)
    elif isinstance(values, dict):
        yield from tensors_of(list(values.values()))
