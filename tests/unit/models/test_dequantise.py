import numpy as np
import pytest
import torch

from protos.service.gguf_types import TENSOR_TYPES
from worker_svc.models.dequantise import DEQUANTISE

BLOCKS = 40


def finite_blocks(name: str, block_bytes: int, seed: int) -> np.ndarray:
    """Random bytes whose leading float16 values are small and finite."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (BLOCKS, block_bytes), np.uint8)
    if name == "Q6_K":
        raw[:, -2:] = rng.normal(size=(BLOCKS, 1)).astype(np.float16).view(np.uint8)
    elif name.startswith("Q"):
        raw[:, :4] = rng.normal(size=(BLOCKS, 2)).astype(np.float16).view(np.uint8)
    else:
        kinds = {"F32": np.float32, "F16": np.float16}
        values = rng.normal(size=BLOCKS).astype(kinds.get(name, np.float32))
        raw = values.view(np.uint8).reshape(BLOCKS, -1)[:, -block_bytes:].copy()
    return raw


def test_the_types_are_those_that_are_promised():
    promised = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K"
    assert set(DEQUANTISE) == set(promised.split())


@pytest.mark.parametrize("name", list(DEQUANTISE))
def test_every_type_equals_the_reference_bit_for_bit(name):
    gguf = pytest.importorskip("gguf")
    kind = next(kind for kind in TENSOR_TYPES.values() if kind.name == name)
    raw = finite_blocks(name, kind.block_bytes, seed=7)
    out = torch.empty(BLOCKS, kind.block_elements)

    DEQUANTISE[name](torch.from_numpy(raw), out)

    reference = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert np.array_equal(out.numpy(), np.asarray(reference, np.float32).reshape(out.shape))
    assert out.isfinite().all()
