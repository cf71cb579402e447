import hashlib

import numpy as np
import pytest
import torch

from protos.service.gguf_header import read_gguf_header
from protos.wire.errors import InvalidModelFile
from tests.support import gguf_bytes as g
from tests.support.gguf_bytes import Tensor, f32_tensor
from worker_svc.models.weights import ParameterSpec, check_fingerprint, load_parameters, stored_tensors

CPU = torch.device("cpu")
MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)
VECTOR = np.array([0.1, 0.2, 0.3], np.float32)
TABLE = [ParameterSpec(name="m", shape=(3, 4)), ParameterSpec(name="v", shape=(3,))]


def load(tmp_path, tensors, table=TABLE, dtype=torch.float32):
    path = g.write(tmp_path / "w.gguf", g.gguf(tensors=tensors))
    return load_parameters(stored_tensors(path, read_gguf_header(path)), table, dtype=dtype, device=CPU)


def test_sets_every_parameter_and_reports_what_is_left(tmp_path):
    extra = f32_tensor("other", VECTOR)

    loaded = load(tmp_path, [f32_tensor("m", MATRIX), extra, f32_tensor("v", VECTOR)])

    assert loaded.extra == ("other",)
    assert set(loaded.tensors) == {"m", "v"}
    assert np.array_equal(loaded.tensors["m"], MATRIX)
    assert np.array_equal(loaded.tensors["v"], VECTOR)


def test_matrices_take_the_dtype_and_vectors_stay_float32(tmp_path):
    loaded = load(tmp_path, [f32_tensor("m", MATRIX), f32_tensor("v", VECTOR)], dtype=torch.bfloat16)
    assert loaded.tensors["m"].dtype == torch.bfloat16
    assert loaded.tensors["v"].dtype == torch.float32


def test_an_optional_parameter_may_be_missing(tmp_path):
    table = [*TABLE, ParameterSpec(name="maybe", shape=(5,), is_optional=True)]
    tensors = [f32_tensor("m", MATRIX), f32_tensor("v", VECTOR)]

    assert "maybe" not in load(tmp_path, tensors, table).tensors
    assert "maybe" in load(tmp_path, [*tensors, f32_tensor("maybe", np.ones(5, np.float32))], table).tensors


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([f32_tensor("m", MATRIX)], "tensor 'v' is missing"),
        ([f32_tensor("m", MATRIX.T), f32_tensor("v", VECTOR)], r"shape \[4, 3\], the architecture needs \[3, 4\]"),
        ([f32_tensor("m", MATRIX.ravel()), f32_tensor("v", VECTOR)], r"shape \[12\]"),
        ([Tensor(name="m", shape=(3, 4), type_number=26, raw=bytes(48)), f32_tensor("v", VECTOR)], "has type I32"),
    ],
)
def test_what_the_architecture_does_not_describe_is_refused(tmp_path, tensors, message):
    with pytest.raises(InvalidModelFile, match=message):
        load(tmp_path, tensors)


def test_the_file_is_only_read(tmp_path):
    load(tmp_path, [f32_tensor("m", MATRIX), f32_tensor("v", VECTOR)]).tensors["m"].zero_()
    assert np.array_equal(load_again(tmp_path), MATRIX)


def load_again(tmp_path) -> np.ndarray:
    path = tmp_path / "w.gguf"
    return (
        load_parameters(stored_tensors(path, read_gguf_header(path)), TABLE, dtype=torch.float32, device=CPU)
        .tensors["m"]
        .numpy()
    )


def test_a_changed_weight_file_is_refused(tmp_path):
    path = g.write(tmp_path / "w.gguf", b"weights")
    check_fingerprint(path, hashlib.sha256(b"weights").hexdigest())
    g.write(path, b"Weights")
    with pytest.raises(InvalidModelFile, match=r"w\.gguf: SHA-256 is .*, the model card says"):
        check_fingerprint(path, hashlib.sha256(b"weights").hexdigest())
