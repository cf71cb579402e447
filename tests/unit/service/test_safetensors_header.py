import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.service.safetensors_folder import folder_fingerprint, read_safetensors_folder
from protos.service.safetensors_header import parse_safetensors_header, read_safetensors_header
from protos.wire.errors import InvalidModelFile
from tests.support.hub_models import safetensors_bytes

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(5, np.float32)}
GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def file_of(header: object, data: bytes = bytes(44)) -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + data


def read(tmp_path, content: bytes):
    (tmp_path / "model.safetensors").write_bytes(content)
    return read_safetensors_header(tmp_path / "model.safetensors")


def test_says_where_tensors_lie(tmp_path):
    content = safetensors_bytes(TENSORS)
    found = read(tmp_path, content)
    assert list(found) == ["a", "b"]
    for name, values in TENSORS.items():
        entry = found[name]
        assert (entry.shape, entry.type.name) == (values.shape, "F32")
        assert content[entry.offset : entry.offset + entry.num_bytes] == values.tobytes()


def test_reads_what_the_library_writes(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    tensors = TENSORS | {"half": np.ones((2, 2), np.float16), "ids": np.arange(3)}
    library.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = read_safetensors_header(tmp_path / "model.safetensors")
    assert {name: (entry.shape, entry.type.name) for name, entry in found.items()} == {
        "a": ((2, 3), "F32"),
        "b": ((5,), "F32"),
        "half": ((2, 2), "F16"),
        "ids": ((3,), "I64"),
    }
    content = (tmp_path / "model.safetensors").read_bytes()
    entry = found["half"]
    assert content[entry.offset : entry.offset + entry.num_bytes] == tensors["half"].tobytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "needs 8 bytes, the file has 0"),
        (b"GGUF" + bytes(100), "header length is 1179993927, limit 33554432"),
        (struct.pack("<Q", 1 << 63), "limit 33554432"),
        (struct.pack("<Q", 100) + b"{}", "the file has 10: it is truncated"),
        (file_of(b"\xff"), "header is no JSON"),
        (file_of(b"[" * 200_000), "nested too deeply|is no JSON"),
        (file_of(b'{"a":' * 200_000), "nested too deeply|is no JSON"),
        (file_of(b'{"a":{},"a":{}}'), "a key occurs twice"),
        (file_of(b'{"a":' + b"9" * 5000 + b"}"), "is no JSON"),
        (file_of([1]), "is no JSON object"),
        (file_of({"a": 1}), "'a' must have dtype, shape and data_offsets"),
        (file_of({"a": GOOD | {"more": 1}}), "must have dtype"),
        (file_of({"a": GOOD | {"dtype": "Q4_K"}}), "has dtype 'Q4_K', which is unknown"),
        (file_of({"a": GOOD | {"dtype": ["F32"]}}), "has dtype"),
        (file_of({"a": GOOD | {"shape": [2, -3]}}), r"has shape \[2, -3\]"),
        (file_of({"a": GOOD | {"shape": [2, 3.0]}}), r"has shape \[2, 3.0\]"),
        (file_of({"a": GOOD | {"shape": [True, 6]}}), "has shape"),
        (file_of({"a": GOOD | {"shape": []}}), "must be 1 to 4 sizes"),
        (file_of({"a": GOOD | {"shape": [1] * 9}}), "must be 1 to 4 sizes"),
        (file_of({"a": GOOD | {"shape": [1 << 62, 1 << 62]}}), "elements, limit"),
        (file_of({"a": GOOD | {"shape": [0]}}), "has 0 elements"),
        (file_of({"a": GOOD | {"data_offsets": [0, 20]}}), "takes 20 bytes, its shape needs 24"),
        (file_of({"a": GOOD | {"data_offsets": [24, 0]}}), "has data_offsets"),
        (file_of({"a": GOOD | {"data_offsets": [40, 64]}}), "the file has 44 bytes"),
        (file_of({"a": GOOD | {"data_offsets": [0]}}), "has data_offsets"),
        (file_of({"a": GOOD, "b": GOOD | {"data_offsets": [20, 44]}}), "'b' starts at byte .*, inside tensor 'a'"),
        (file_of({"x" * 300: GOOD}), "has a name above 256 bytes"),
        (file_of({str(n): GOOD for n in range(20_001)}), "has 20001 tensors, limit 20000"),
    ],
)
def test_a_hostile_file_is_refused_in_a_short_sentence(tmp_path, content, message):
    with pytest.raises(InvalidModelFile, match=message) as caught:
        read(tmp_path, content)
    assert caught.value.message.startswith("model.safetensors: ")
    assert len(caught.value.message) < 400


@settings(max_examples=300)
@given(st.binary(max_size=40), st.integers(0, 100), st.integers(0, 255))
def test_whatever_the_bytes_are_tensors_lie_inside_the_file(noise, place, value):
    head = bytearray(json.dumps({"a": GOOD, "b": GOOD | {"data_offsets": [24, 48]}}).encode())
    head[place % len(head)] = value
    for candidate in (bytes(head), noise):
        try:
            found = parse_safetensors_header(candidate, data_bytes=48, label="m")
        except InvalidModelFile:
            continue
        begin = 8 + len(candidate)
        assert all(begin <= entry.offset <= begin + 48 - entry.num_bytes for entry in found.values())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for number, (name, values) in enumerate(TENSORS.items(), start=1):
        (tmp_path / f"model-{number}.safetensors").write_bytes(safetensors_bytes({name: values}))
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    return tmp_path


def write_index(path, weight_map):
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_folder_of_several_files_is_read_by_its_index_or_without(folder):
    found = read_safetensors_folder(folder)
    assert {name: tensor.path.name for name, tensor in found.tensors.items()} == {
        "a": "model-1.safetensors",
        "b": "model-2.safetensors",
    }
    (folder / "model.safetensors.index.json").unlink()
    assert read_safetensors_folder(folder).tensors == found.tensors


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "model-1.safetensors", "b": "model-1.safetensors"}, "'b' is not in 'model-1.safetensors'"),
        ({"a": "model-3.safetensors"}, "has no 'model-3.safetensors'"),
        ({"a": "../model-1.safetensors"}, r"no \*.safetensors file beside it"),
        ({"a": "config.json"}, r"no \*.safetensors file beside it"),
        ({"a": 1}, "must give a file for each tensor"),
        ([1], "must give a file for each tensor"),
        ({}, "is no model folder: model.safetensors.index.json names no file"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(folder, weight_map, message):
    write_index(folder, weight_map)
    with pytest.raises(InvalidModelFile, match=message) as caught:
        read_safetensors_folder(folder)
    assert str(folder.parent) not in caught.value.message


def test_a_tensor_in_two_files_is_refused(folder):
    (folder / "model-3.safetensors").write_bytes(safetensors_bytes({"a": TENSORS["a"]}))
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(InvalidModelFile, match=r"'a' is in model-1\.safetensors and in model-3\.safetensors"):
        read_safetensors_folder(folder)


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_a_config_that_is_no_object_is_refused(folder, content):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(InvalidModelFile, match=r"config\.json"):
        read_safetensors_folder(folder)


def test_the_fingerprint_changes_with_every_file(folder):
    known = {folder_fingerprint(folder)}
    for name in ("config.json", "model-1.safetensors", "model-2.safetensors"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        known.add(folder_fingerprint(folder))
    assert len(known) == 4
