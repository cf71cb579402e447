"""Rotary position embedding: pairs (i, i + head_dim / 2) of each head turn by position-dependent angles."""

import math

import torch
from torch import Tensor

from protos.service.model_config import RopeBands


def inverse_frequencies(head_dim: int, *, base: float) -> Tensor:
    """[head_dim / 2] float32: turns per position."""
    return 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def banded_frequencies(frequencies: Tensor, bands: RopeBands) -> Tensor:
    """`frequencies` as Llama 3 stretches them: by the whole factor, not at all, or by a part of it between the two."""
    share = bands.first_context_tokens * frequencies / (2 * math.pi)
    share = ((share - bands.low_freq_factor) / (bands.high_freq_factor - bands.low_freq_factor)).clamp(0, 1)
    return (1 - share) * frequencies / bands.factor + share * frequencies


class RotaryTable:
    """Cosines and sines of every position, float32. Made once at load, read by all layers."""

    def __init__(self, frequencies: Tensor, *, num_positions: int, device: torch.device) -> None:
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
        self._cosines = angles.cos().to(device)
        self._sines = angles.sin().to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines at `positions` [n] int64, each [n, 1, head_dim / 2]."""
        return self._cosines[positions][:, None], self._sines[positions][:, None]


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """`heads` [n, num_heads, head_dim] turned by their positions' angles, in float32; the same dtype, owned."""
    left, right = heads.float().chunk(2, dim=-1)
    turned = torch.empty(heads.shape, dtype=torch.float32, device=heads.device)
    turned_left, turned_right = turned.chunk(2, dim=-1)
    torch.mul(left, cosines, out=turned_left).sub_(right * sines)
    torch.mul(right, cosines, out=turned_right).add_(left * sines)
    return turned.to(heads.dtype)
