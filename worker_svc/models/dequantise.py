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


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """[n, 12] bytes -> scales and minimums of the 8 sub-blocks, each [n, 8]: the first four whole, the others split."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), 1)
    minimums = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), 1)
    return scales, minimums


def _nibbles_of_pairs(packed: Tensor) -> Tensor:
    """[n, 128] bytes -> [n, 8, 32]: 32 bytes hold two sub-blocks, the first in the low nibbles."""
    pairs = packed.view(-1, 4, 1, 32)
    return torch.cat((pairs & 15, pairs >> 4), 2).view(-1, 8, 32)


def _scale_and_offset(blocks: Tensor, quants: Tensor, out: Tensor) -> None:
    """Q4_K and Q5_K: value = (d * scale) * quant - (dmin * minimum), by sub-block of 32."""
    scales, minimums = _six_bit_scales(blocks[:, 4:16])
    steps = (_halves(blocks, 0) * scales)[:, :, None]
    offsets = (_halves(blocks, 2) * minimums)[:, :, None]
    torch.mul(quants, steps, out=out.view(-1, 8, 32)).sub_(offsets)


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    _scale_and_offset(blocks, _nibbles_of_pairs(blocks[:, 16:].contiguous()), out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    fifth = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    _scale_and_offset(blocks, _nibbles_of_pairs(blocks[:, 48:].contiguous()) | (fifth << 4), out)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), 2).view(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = (high >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]) & 3
    quants = (low | (high << 4)).view(-1, 16, 16).float().sub_(32)
    steps = _halves(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
    torch.mul(quants, steps[:, :, None], out=out.view(-1, 16, 16))


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
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
"""By type name: every one of `model_tensors.WEIGHT_TYPES`. Others are refused before, from the headers."""
