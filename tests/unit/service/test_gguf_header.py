import struct
import time

import numpy as np
import pytest

from protos.service.gguf_header import (
    MAX_METADATA_KEYS,
    MAX_TENSORS,
    parse_gguf_header,
    read_gguf_header,
    shown,
)
from protos.service.gguf_types import TENSOR_TYPES
from protos.wire.errors import InvalidModelFile
from tests.support import gguf_bytes as g
from tests.support.gguf_bytes import Tensor, gguf

TWO = (Tensor(name="a"), Tensor(name="b"))


def parse(content: bytes, **options):
    return parse_gguf_header(content, **{"file_bytes": len(content), "label": "x.gguf", **options})


def test_reads_every_kind_of_value():
    metadata = [
        *(g.entry(f"k{kind}", kind, 1) for kind in (0, 1, 2, 3, 4, 5, 10, 11)),
        g.entry("f", g.F32, 0.5),
        g.entry("d", 12, 0.1),
        g.entry("yes", g.BOOL, True),
        g.entry("s", g.STRING, "text ü"),
        g.array_entry("texts", g.STRING, ["a", "", "ü"]),
        g.array_entry("ints", 5, [-1, 2]),
        g.array_entry("bools", g.BOOL, [True, False]),
        g.array_entry("none", g.STRING, []),
    ]

    found = parse(gguf(metadata=metadata)).metadata

    assert all(found[f"k{kind}"] == 1 for kind in (0, 1, 2, 3, 4, 5, 10, 11))
    assert (found["f"], found["d"], found["yes"], found["s"]) == (0.5, 0.1, True, "text ü")
    assert found["texts"] == ("a", "", "ü")
    assert found["none"] == ()
    assert found["ints"].tolist() == [-1, 2]
    assert found["bools"].tolist() == [True, False]


def test_places_tensors_behind_the_aligned_header():
    tensors = (Tensor(name="a", shape=(2, 32), type_number=8, raw=bytes(68)), Tensor(name="b"))
    content = gguf(tensors=tensors)

    found = parse(content).tensors

    assert list(found) == ["a", "b"]
    assert found["a"].shape == (2, 32)
    assert (found["a"].num_bytes, found["b"].num_bytes) == (68, 16)
    assert found["a"].offset % 32 == 0
    assert found["b"].offset == found["a"].offset + 96
    assert found["b"].offset + 16 == len(content)


def test_another_alignment_moves_the_data():
    metadata = [g.entry("general.alignment", g.U32, 64)]
    content = gguf(metadata=metadata, tensors=TWO, alignment=64)
    assert [info.offset % 64 for info in parse(content).tensors.values()] == [0, 0]


def test_agrees_with_the_reference_reader(tmp_path):
    gguf_package = pytest.importorskip("gguf")
    tensors = [
        Tensor(name=f"t{number}", shape=(3, 256), type_number=number, raw=bytes(size))
        for number, kind in TENSOR_TYPES.items()
        if (size := 3 * 256 // kind.block_elements * kind.block_bytes)
    ]
    metadata = [g.entry("general.architecture", g.STRING, "llama"), g.array_entry("words", g.STRING, ["a", "bc"])]
    path = g.write(tmp_path / "all.gguf", gguf(metadata=metadata, tensors=tensors))

    ours, theirs = read_gguf_header(path), gguf_package.GGUFReader(path)

    assert [(info.name, info.offset, info.num_bytes) for info in ours.tensors.values()] == [
        (tensor.name, tensor.data_offset, tensor.n_bytes) for tensor in theirs.tensors
    ]
    assert [info.type.name for info in ours.tensors.values()] == [t.tensor_type.name for t in theirs.tensors]
    assert list(ours.metadata["words"]) == theirs.fields["words"].contents()


def test_block_sizes_are_the_reference_readers():
    constants = pytest.importorskip("gguf.constants")
    theirs = {kind.value: (kind.name, *size) for kind, size in constants.GGML_QUANT_SIZES.items()}
    ours = {number: (kind.name, kind.block_elements, kind.block_bytes) for number, kind in TENSOR_TYPES.items()}
    assert ours == {number: theirs[number] for number in ours}


HUGE = 1 << 62
LONG_NAME = "n" * 257
BAD = {
    "empty": (b"", "magic needs 4 bytes"),
    "text file": (b"Hello, this is a text file named .gguf\n" * 9, "no GGUF file"),
    "only magic": (b"GGUF", "version needs 4 bytes"),
    "version 1": (gguf(version=1), "version is 1"),
    "version 4": (gguf(version=4), "version is 4"),
    "big-endian": (gguf(version=0x03000000), "version is 50331648"),
    "no counts": (b"GGUF" + struct.pack("<I", 3), "tensor count needs 8 bytes"),
    "half a count": (b"GGUF" + struct.pack("<IQ", 3, 0) + b"\0\0", "metadata count needs 8 bytes"),
    "tensor count over limit": (gguf(num_tensors=MAX_TENSORS + 1), f"tensor count is 20001, limit {MAX_TENSORS}"),
    "tensor count huge": (gguf(num_tensors=2**64 - 1), "tensor count is"),
    "key count over limit": (gguf(num_keys=MAX_METADATA_KEYS + 1), "metadata count is 4097"),
    "key count beyond the file": (gguf(num_keys=3), "truncated"),
    "tensor count beyond the file": (gguf(tensors=TWO, num_tensors=9), "dimensions|truncated|bytes"),
    "key length over limit": (gguf(metadata=[g.entry(LONG_NAME, g.U32, 1)]), "has 257 bytes, limit 256"),
    "key length huge": (gguf(metadata=[struct.pack("<Q", HUGE)]), "metadata key 0 has"),
    "key not UTF-8": (gguf(metadata=[g.entry(b"\xff\xfe", g.U32, 1)]), "not UTF-8 at its byte 0"),
    "key twice": (gguf(metadata=[g.entry("k", g.U32, 1)] * 2), "'k' occurs twice"),
    "value type unknown": (gguf(metadata=[g.text("k") + struct.pack("<I", 13)]), "value type 13"),
    "value missing": (gguf(metadata=[g.text("k")], alignment=1), "k needs 4 bytes"),
    "number cut": (gguf(metadata=[g.text("k") + struct.pack("<I", 10) + b"\0"], alignment=1), "k needs 8 bytes"),
    "string length huge": (gguf(metadata=[g.text("k") + struct.pack("<IQ", 8, HUGE)]), "limit 33554432"),
    "string cut": (gguf(metadata=[g.text("k") + struct.pack("<IQ", 8, 999) + b"ab"]), "k needs 999 bytes"),
    "string not UTF-8": (gguf(metadata=[g.entry("k", g.STRING, b"ab\x80")]), "not UTF-8 at its byte 2"),
    "array of arrays": (gguf(metadata=[g.text("k") + struct.pack("<IIQ", 9, 9, 1)]), "array elements of type 9"),
    "array element type unknown": (gguf(metadata=[g.text("k") + struct.pack("<IIQ", 9, 99, 1)]), "of type 99"),
    "array count huge": (gguf(metadata=[g.text("k") + struct.pack("<IIQ", 9, 4, HUGE)]), "truncated"),
    "array count overflows 64 bits": (gguf(metadata=[g.text("k") + struct.pack("<IIQ", 9, 10, 2**61)]), "truncated"),
    "string array count huge": (gguf(metadata=[g.text("k") + struct.pack("<IIQ", 9, 8, HUGE)]), "truncated"),
    "string array element huge": (
        gguf(metadata=[g.text("k") + struct.pack("<IIQQQ", 9, 8, 2, HUGE, 0)]),
        r"k\[0\] needs",
    ),
    "string array cut in a length": (
        gguf(metadata=[g.text("k") + struct.pack("<IIQ", 9, 8, 2) + g.text("abcdefgh")[:-1] + b"\0" * 2], alignment=1),
        r"k\[1\] needs",
    ),
    "string array not UTF-8": (gguf(metadata=[g.array_entry("k", 8, ["a", b"\xff"])]), r"k\[1\] is not UTF-8"),
    "alignment no power of two": (gguf(metadata=[g.entry("general.alignment", g.U32, 48)]), "is 48, must be a power"),
    "alignment 0": (gguf(metadata=[g.entry("general.alignment", g.U32, 0)]), "is 0, must be a power"),
    "alignment huge": (gguf(metadata=[g.entry("general.alignment", g.U32, 1 << 31)]), "must be a power of two"),
    "alignment a text": (gguf(metadata=[g.entry("general.alignment", g.STRING, "x" * 999)]), "'xxx.*must be a power"),
    "tensor name over limit": (gguf(tensors=[Tensor(name=LONG_NAME)]), "tensor name has 257 bytes"),
    "tensor name twice": (gguf(tensors=[Tensor(name="a")] * 2), "'a' occurs twice"),
    "no dimensions": (gguf(tensors=[Tensor(name="a", shape=(), rank=0)]), "has 0 dimensions"),
    "five dimensions": (gguf(tensors=[Tensor(name="a", shape=(1,) * 5)]), "has 5 dimensions"),
    "dimensions huge": (gguf(tensors=[Tensor(name="a", rank=2**32 - 1)]), "has 4294967295 dimensions"),
    "dimension 0": (gguf(tensors=[Tensor(name="a", shape=(0, 4))]), "has 0 elements"),
    "product wraps to 0": (gguf(tensors=[Tensor(name="a", shape=(2**32, 2**32))]), "has 18446744073709551616 elements"),
    "product wraps to little": (gguf(tensors=[Tensor(name="a", shape=(2**63, 2, 4))]), "elements, limit"),
    "type unknown": (gguf(tensors=[Tensor(name="a", type_number=4)]), "has type 4"),
    "type huge": (gguf(tensors=[Tensor(name="a", type_number=2**32 - 1)]), "has type 4294967295"),
    "rows no multiple of the block": (gguf(tensors=[Tensor(name="a", shape=(8, 31), type_number=3)]), "block of 32"),
    "offset unaligned": (gguf(tensors=[Tensor(name="a", offset=4)]), "offset 4, not a multiple of the alignment 32"),
    "offset beyond the file": (gguf(tensors=[Tensor(name="a", offset=1 << 20)]), "the file has"),
    "offset huge": (gguf(tensors=[Tensor(name="a", offset=2**64 - 32)]), "the file has"),
    "data cut": (gguf(tensors=[Tensor(name="a", shape=(1 << 20,))]), "truncated"),
    "same offset twice": (gguf(tensors=[Tensor(name="a"), Tensor(name="b", offset=0)]), "inside tensor 'a'"),
    "overlap": (
        gguf(tensors=[Tensor(name="a", shape=(64,), raw=bytes(256)), Tensor(name="b", offset=128)]),
        "inside tensor 'a'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_field_value_and_limit(name, tmp_path):
    content, message = BAD[name]
    path = g.write(tmp_path / "bad.gguf", content)

    spent = []
    for _ in range(3):
        begin = time.thread_time()
        with pytest.raises(InvalidModelFile, match=message) as caught:
            read_gguf_header(path)
        spent.append(time.thread_time() - begin)

    assert min(spent) < 0.3
    assert str(tmp_path) not in caught.value.message
    assert caught.value.message.startswith("bad.gguf: ")
    assert len(caught.value.message) < 400


def test_every_cut_of_a_good_file_is_refused():
    metadata = [g.entry("k", g.STRING, "v"), g.array_entry("a", g.STRING, ["x", "yz"])]
    content = gguf(metadata=metadata, tensors=TWO)
    for size in range(len(content)):
        with pytest.raises(InvalidModelFile):
            parse(content[:size])


def test_changed_bytes_give_a_header_or_a_refusal_and_nothing_else():
    metadata = [g.entry("k", g.STRING, "v"), g.array_entry("a", g.STRING, ["x", "yz"]), g.array_entry("n", 5, [1, 2])]
    content = gguf(metadata=metadata, tensors=TWO)
    rng = np.random.default_rng(5)
    for _ in range(400):
        changed = bytearray(content)
        for place in rng.integers(0, len(content), rng.integers(1, 4)):
            changed[place] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, int(rng.integers(256))])
        try:
            found = parse(bytes(changed))
        except InvalidModelFile:
            continue
        assert all(info.offset + info.num_bytes <= len(content) for info in found.tensors.values())


def test_a_header_over_the_limit_is_refused_without_reading_on():
    content = gguf(metadata=[g.entry("k", g.STRING, "v" * 500)])
    with pytest.raises(InvalidModelFile, match="header has more than"):
        parse(content[:100], file_bytes=1 << 30)


def test_a_file_that_cannot_be_read_says_only_its_name(tmp_path):
    with pytest.raises(InvalidModelFile, match=r"none\.gguf cannot be read: No such file") as caught:
        read_gguf_header(tmp_path / "none.gguf")
    assert str(tmp_path) not in caught.value.message


def test_shown_values_are_short():
    assert shown("x" * 1000) == "'" + "x" * 79 + "..."
    assert shown(("a", "b")) == "an array of 2"


@pytest.mark.model
def test_the_real_header_is_read_in_a_moment():
    from tests.support.model import model_folder

    path = model_folder().weights
    times = []
    for _ in range(3):
        begin = time.thread_time()
        header = read_gguf_header(path)
        times.append(time.thread_time() - begin)

    assert min(times) < 0.3
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(header.tensors) == 272
