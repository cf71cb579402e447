"""Writes GGUF files, good and bad ones: every number of the format can be given as it shall stand."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
_FORMS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(kind: int, value: Any) -> bytes:
    return text(value) if kind == STRING else struct.pack(_FORMS[kind], value)


def entry(key: str | bytes, kind: int, value: Any) -> bytes:
    return text(key) + struct.pack("<I", kind) + value_bytes(kind, value)


def array_entry(key: str, kind: int, values: Sequence[Any]) -> bytes:
    head = struct.pack("<IIQ", ARRAY, kind, len(values))
    return text(key) + head + b"".join(value_bytes(kind, value) for value in values)


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """`shape` is row-major; `offset` None: right behind the one before, aligned."""

    name: str
    shape: tuple[int, ...] = (4,)
    type_number: int = 0
    raw: bytes = bytes(16)
    offset: int | None = None
    rank: int | None = None


def gguf(
    *,
    metadata: Sequence[bytes] = (),
    tensors: Sequence[Tensor] = (),
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """The bytes of a file. Counts default to what is given."""
    counts = len(tensors) if num_tensors is None else num_tensors, len(metadata) if num_keys is None else num_keys
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(metadata)
    data = b""
    for tensor in tensors:
        data += bytes(-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        rank = len(tensor.shape) if tensor.rank is None else tensor.rank
        head += text(tensor.name) + struct.pack(f"<I{len(tensor.shape)}Q", rank, *tensor.shape[::-1])
        head += struct.pack("<IQ", tensor.type_number, offset)
        data += tensor.raw
    return head + bytes(-len(head) % alignment) + data


def f32_tensor(name: str, values: np.ndarray) -> Tensor:
    return Tensor(name=name, shape=values.shape, raw=np.ascontiguousarray(values, np.float32).tobytes())


def q8_0_tensor(name: str, values: np.ndarray) -> Tensor:
    """Rows of a multiple of 32 values."""
    kind = GGMLQuantizationType.Q8_0
    return Tensor(name=name, shape=values.shape, type_number=int(kind), raw=quantize(values, kind).tobytes())


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
