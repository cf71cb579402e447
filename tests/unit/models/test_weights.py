import hashlib

import numpy as np
import pytest
import torch

from protos.service.gguf_header import read_gguf_header
from protos.service.model_tensors import FAMILY_SHAPES, WEIGHT_TYPES
from protos.service.safetensors_folder import StoredTensor
from protos.wire.errors import InvalidModelFile
from tests.support import gguf_bytes as g
from tests.support.gguf_bytes import f32_tensor
from worker_svc.models.dequantise import DEQUANTISE
from worker_svc.models.registry import FAMILIES
from worker_svc.models.weights import check_fingerprint, load_parameters

CPU = torch.device("cpu")
MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)
VECTOR = np.array([0.1, 0.2, 0.3], np.float32)


def load(path, dtype=torch.float32):
    tensors = {name: StoredTensor(path=path, entry=entry) for name, entry in read_gguf_header(path).tensors.items()}
    return load_parameters(tensors, dtype=dtype, device=CPU)


@pytest.fixture
def file(tmp_path):
    return g.write(tmp_path / "w.gguf", g.gguf(tensors=[f32_tensor("m", MATRIX), f32_tensor("v", VECTOR)]))


def test_every_tensor_that_is_described_is_read(file):
    loaded = load(file)
    assert set(loaded) == {"m", "v"}
    assert np.array_equal(loaded["m"], MATRIX)
    assert np.array_equal(loaded["v"], VECTOR)


def test_matrices_take_the_dtype_and_vectors_stay_float32(file):
    loaded = load(file, torch.bfloat16)
    assert loaded["m"].dtype == torch.bfloat16
    assert loaded["v"].dtype == torch.float32


def test_what_headers_are_checked_for_is_what_can_be_read_and_built():
    assert set(WEIGHT_TYPES) == set(DEQUANTISE)
    assert set(FAMILY_SHAPES) == set(FAMILIES)


def test_the_file_is_only_read(file):
    load(file)["m"].zero_()
    assert np.array_equal(load(file)["m"], MATRIX)


def test_a_changed_weight_file_is_refused(tmp_path):
    path = g.write(tmp_path / "w.gguf", b"weights")
    check_fingerprint(path, hashlib.sha256(b"weights").hexdigest())
    g.write(path, b"Weights")
    with pytest.raises(InvalidModelFile, match=r"w\.gguf: SHA-256 is .*, the model card says"):
        check_fingerprint(path, hashlib.sha256(b"weights").hexdigest())
