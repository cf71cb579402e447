"""GGUF blocks -> float32, vectorised, by type name.

Every function takes raw blocks [n, block_bytes] uint8 and fills [n, block_elements] float32. The order of operations is
the format's own (scale, then offset, each rounded to float32), so the values equal the reference's bit for bit.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

Dequantise = Callable[[Tensor, Tensor], None]


def _halves(blocks: Tensor, begin: int) -> Tensor:
    """[n, 1] float32: the float16 at byte `begin` of each block."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """Low nibbles into the left half of `out`, high ones into the right half."""
    width = packed.shape[1]
    out[:, :width] = packed & 15
    out[:, width:] = packed >> 4


def _add_fifth_bits(blocks: Tensor, begin: int, out: Tensor) -> None:
    """Add 16 where the 32-bit mask at byte `begin` has the element's bit set."""
    masks = blocks[:, begin : begin + 4, None]
    bits = (masks >> torch.arange(8, dtype=torch.uint8)) & 1
    out += bits.reshape(len(blocks), 32) * 16


def _f32(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.float32))


def _f16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.float16))


def _bf16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.bfloat16))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_halves(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 4:], out)
    out.mul_(_halves(blocks, 0)).add_(_halves(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 6:], out)
    _add_fifth_bits(blocks, 2, out)
    out.sub_(16).mul_(_halves(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 8:], out)
    _add_fifth_bits(blocks, 4, out)
    out.mul_(_halves(blocks, 0)).add_(_halves(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_halves(blocks, 0))


DEQUANTISE: Mapping[str, Dequantise] = MappingProxyType(
    {
        "F32": _f32,
        "F16": _f16,
        "BF16": _bf16,
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
    }
)
"""By type name. A type that is missing here is refused when the weights are loaded."""
