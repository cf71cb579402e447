"""Copies that belong to a batch: read-only host arrays, tensors with a tail. Knows no batch."""

import numpy as np
from torch import Tensor

Array = np.ndarray


def frozen_copy(values: Array) -> Array:
    """A read-only copy."""
    copy = np.array(values)
    copy.setflags(write=False)
    return copy


def with_tail(values: Tensor, length: int, *, fill: int) -> Tensor:
    """A copy of [n], `length` elements long, with `fill` behind its own."""
    padded = values.new_full((length,), fill)
    padded[: len(values)] = values
    return padded


def is_same(tensor: Tensor, host: Array) -> bool:
    """Whether a tensor and its host copy hold the same. Reads the device: for tests."""
    return bool(np.array_equal(tensor.detach().cpu().numpy(), host))
