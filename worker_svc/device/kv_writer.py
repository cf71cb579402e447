"""How keys or values reach their slots: a Triton kernel on CUDA devices, torch's indexing elsewhere.

Chosen once, when a pool is made. Both round to the type of the pool; what lies in the sink afterwards nobody reads.
"""

import importlib
import logging
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_TRITON_OPS = "kernels.triton_ops.index_ops"
"""Imported by name: Triton takes a second to load and is not there on machines without a GPU."""


class KVWriter(Protocol):
    """Copies each token's heads into its slot."""

    def __call__(self, source: Tensor, slots: Tensor, target: Tensor) -> None:
        """[num_tokens, heads, dim] at `slots` [num_tokens] int64 of [heads, num_pages, page_size, dim]."""
        ...


def kv_writer(device: torch.device) -> KVWriter:
    """The writer for pools on `device`."""
    if device.type != "cuda":
        return write_with_torch
    if find_spec("triton") is None:
        logger.warning("no Triton: torch writes keys and values, one launch for each step of the indexing")
        return write_with_torch
    return cast("KVWriter", importlib.import_module(_TRITON_OPS).write_kv)


def write_with_torch(source: Tensor, slots: Tensor, target: Tensor) -> None:
    """See `KVWriter`."""
    page_size = target.shape[2]
    pages = torch.div(slots, page_size, rounding_mode="floor")
    target[:, pages, slots - pages * page_size] = source.transpose(0, 1).to(target.dtype)
