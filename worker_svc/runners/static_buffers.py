"""Inputs of captured graphs at fixed addresses, shared by all shapes, each with its padding policy.

Filled before each replay in three phases: reset tails, copy, computed fills. Guards: nothing of an earlier step is left
where a graph reads, so garbage between two replays changes nothing.
"""

from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from worker_svc.batch.forward_batch import ForwardBatch


class Padding(Enum):
    """What stands behind the real elements of a static buffer."""

    ZERO_TAIL = auto()
    """Index-like: zero names the sink, the first position, the first id of the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StaticBuffer:
    """One input of the graphs."""

    field: str
    """Of the batch."""
    tensor: Tensor
    """[largest number of tokens]"""
    padding: Padding


class StaticBuffers:
    """Made once, before the first capture, for the largest shape."""

    def __init__(self, *, max_tokens: int, device: torch.device) -> None:
        self.input_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.buffers = (
            StaticBuffer(field="input_ids", tensor=self.input_ids, padding=Padding.ZERO_TAIL),
            StaticBuffer(field="positions", tensor=self.positions, padding=Padding.ZERO_TAIL),
        )

    @property
    def num_bytes(self) -> int:
        """Of all buffers."""
        return sum(buffer.tensor.nbytes for buffer in self.buffers)

    def fill(self, batch: ForwardBatch, *, num_tokens: int) -> None:
        """Make `batch`, which is not padded, the input of the next replay of a shape of `num_tokens` tokens."""
        real = batch.num_tokens
        for buffer in self.buffers:
            buffer.tensor[real:num_tokens].zero_()
            buffer.tensor[:real].copy_(getattr(batch, buffer.field))

    def poison(self, value: int) -> None:
        """Fill every buffer with garbage. For tests."""
        for buffer in self.buffers:
            buffer.tensor.fill_(value)
