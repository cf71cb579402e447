"""Reads a GGUF file's header: metadata and tensor places, never a tensor.

Every length, count, offset and product is checked against a cap or the file's size before it is used, in Python's
unbounded integers. Guards: a header that is returned describes tensors that lie inside the file and do not overlap;
whatever the bytes are, the answer is a header or `InvalidModelFile`.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protos.service.gguf_types import TENSOR_TYPES, TensorType
from protos.wire.errors import InvalidModelFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 32 << 20
MAX_METADATA_KEYS = 4096
MAX_TENSORS = 20_000
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 256
MAX_TENSOR_ELEMENTS = 1 << 40
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 16
MAX_SHOWN = 80

Value = int | float | bool | str | tuple[str, ...] | np.ndarray
"""A metadata value; arrays of numbers are read-only NumPy arrays."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]
    """Row-major: the last dimension is contiguous (the file stores it first)."""
    type: TensorType
    offset: int
    """Of its first byte in the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """A checked header."""

    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorEntry]
    """By name, in file order."""


def shown(value: object) -> str:
    """A value for a message: of bounded length, whatever the file holds."""
    if isinstance(value, tuple | np.ndarray):
        return f"an array of {len(value)}"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def said(value: object) -> str:
    """What a message says of a key's value; None: the key is not there."""
    return "is missing" if value is None else f"is {shown(value)}"


def read_gguf_header(path: Path) -> GgufHeader:
    """The header of the file at `path`.

    Raises:
        InvalidModelFile: not GGUF, truncated or malformed; names the field, the value and the limit.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(MAX_HEADER_BYTES)
    except OSError as error:
        raise InvalidModelFile(f"{path.name} cannot be read: {error.strerror}", field="model") from error
    return parse_gguf_header(head, file_bytes=size, label=path.name)


def parse_gguf_header(head: bytes, *, file_bytes: int, label: str) -> GgufHeader:
    """The header in `head`, the first bytes of a file of `file_bytes` bytes. `label` names it in messages.

    Raises:
        InvalidModelFile: see `read_gguf_header`.
    """
    reader = _Reader(head, is_cut=len(head) < file_bytes, label=label)
    if reader.take(4, "magic") != MAGIC:
        raise reader.error("magic", "is not GGUF: this is no GGUF file")
    version = reader.u32("version")
    if version not in VERSIONS:
        raise reader.error("version", f"is {version}, supported: 2 and 3, little-endian")
    num_tensors = reader.count("tensor count", MAX_TENSORS)
    num_keys = reader.count("metadata count", MAX_METADATA_KEYS)
    metadata = _read_metadata(reader, num_keys)
    alignment = _alignment(reader, metadata)
    stored = [_read_tensor(reader) for _ in range(num_tensors)]
    start = -(-reader.position // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for entry in stored:
        if entry.name in tensors:
            raise reader.error(f"tensor {shown(entry.name)}", "occurs twice")
        tensors[entry.name] = _place(reader, entry, start=start, alignment=alignment)
    _check_places(reader, tensors, file_bytes=file_bytes)
    return GgufHeader(version=version, metadata=metadata, tensors=tensors)


class _StoredTensor(NamedTuple):
    """A tensor's entry as it is written."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int


class _Reader:
    """A position in the header's bytes. Lives for one parse."""

    def __init__(self, head: bytes, *, is_cut: bool, label: str) -> None:
        self.head = head
        self.position = 0
        self._is_cut = is_cut
        self._label = label

    def error(self, field: str, problem: str) -> InvalidModelFile:
        return InvalidModelFile(f"{self._label}: {field} {problem}", field=field)

    def need(self, size: int, field: str) -> None:
        """Raise unless `size` more bytes are there."""
        left = len(self.head) - self.position
        if size <= left:
            return
        if self._is_cut:
            raise self.error("header", f"has more than {MAX_HEADER_BYTES} bytes at {field}, the limit")
        raise self.error(field, f"needs {size} bytes at offset {self.position}, the file has {left}: it is truncated")

    def take(self, size: int, field: str) -> bytes:
        self.need(size, field)
        begin, self.position = self.position, self.position + size
        return self.head[begin : self.position]

    def u32(self, field: str) -> int:
        value: int = _U32.unpack(self.take(4, field))[0]
        return value

    def u64(self, field: str) -> int:
        value: int = _U64.unpack(self.take(8, field))[0]
        return value

    def count(self, field: str, limit: int) -> int:
        value = self.u64(field)
        if value > limit:
            raise self.error(field, f"is {value}, limit {limit}")
        return value

    def text(self, field: str, *, limit: int = MAX_HEADER_BYTES) -> str:
        size = self.u64(field)
        if size > limit:
            raise self.error(field, f"has {size} bytes, limit {limit}")
        return self.decoded(self.take(size, field), field)

    def decoded(self, raw: bytes, field: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(field, f"is not UTF-8 at its byte {error.start}") from error

    def texts(self, count: int, field: str) -> tuple[str, ...]:
        """`count` strings. One loop without calls: vocabularies have a quarter of a million of them."""
        head, position, end = self.head, self.position, len(self.head)
        unpack, found = _U64.unpack_from, []
        try:
            for _ in range(count):
                (size,) = unpack(head, position)
                begin = position + 8
                position = begin + size
                if position > end:
                    break
                found.append(head[begin:position].decode())
        except struct.error:
            position = end + 1
        except UnicodeDecodeError as error:
            raise self.error(f"{field}[{len(found)}]", f"is not UTF-8 at its byte {error.start}") from error
        if position > end:
            self.need(position - self.position, f"{field}[{len(found)}]")
        self.position = position
        return tuple(found)


def _read_metadata(reader: _Reader, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(count):
        key = reader.text(f"metadata key {index}", limit=MAX_NAME_BYTES)
        if key in metadata:
            raise reader.error(f"metadata key {shown(key)}", "occurs twice")
        metadata[key] = _read_value(reader, key)
    return metadata


def _read_value(reader: _Reader, key: str) -> Value:
    kind = reader.u32(key)
    if kind == _STRING:
        return reader.text(key)
    if kind == _ARRAY:
        return _read_array(reader, key)
    if kind not in _SCALARS:
        raise reader.error(key, f"has value type {kind}, known: 0 to 12")
    form = _SCALARS[kind]
    value: int | float | bool = struct.unpack(form, reader.take(struct.calcsize(form), key))[0]
    return value


def _read_array(reader: _Reader, key: str) -> Value:
    kind = reader.u32(key)
    count = reader.u64(key)
    if kind != _STRING and kind not in _SCALARS:
        raise reader.error(key, f"has array elements of type {kind}; numbers and strings are supported")
    form = _SCALARS.get(kind, "<Q")
    size = struct.calcsize(form)
    reader.need(count * size, key)
    if kind == _STRING:
        return reader.texts(count, key)
    raw = reader.take(count * size, key)
    return np.frombuffer(raw, np.bool_ if kind == _BOOL else np.dtype(form))


def _alignment(reader: _Reader, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise reader.error("general.alignment", f"is {shown(value)}, must be a power of two from 8 to {MAX_ALIGNMENT}")
    return value


def _read_tensor(reader: _Reader) -> _StoredTensor:
    name = reader.text("tensor name", limit=MAX_NAME_BYTES)
    field = f"tensor {shown(name)}"
    rank = reader.u32(field)
    if not 1 <= rank <= MAX_DIMENSIONS:
        raise reader.error(field, f"has {rank} dimensions, must be 1 to {MAX_DIMENSIONS}")
    shape = struct.unpack(f"<{rank}Q", reader.take(8 * rank, field))[::-1]
    return _StoredTensor(name=name, shape=shape, type_number=reader.u32(field), offset=reader.u64(field))


def _place(reader: _Reader, stored: _StoredTensor, *, start: int, alignment: int) -> TensorEntry:
    """The stored entry with its size, checked on its own."""
    field = f"tensor {shown(stored.name)}"
    kind = TENSOR_TYPES.get(stored.type_number)
    if kind is None:
        raise reader.error(field, f"has type {stored.type_number}, which is unknown")
    elements = math.prod(stored.shape)
    if not 1 <= elements <= MAX_TENSOR_ELEMENTS:
        raise reader.error(field, f"of shape {list(stored.shape)} has {elements} elements, limit {MAX_TENSOR_ELEMENTS}")
    if stored.shape[-1] % kind.block_elements:
        raise reader.error(
            field, f"has rows of {stored.shape[-1]}, not a multiple of {kind.name}'s block of {kind.block_elements}"
        )
    if stored.offset % alignment:
        raise reader.error(field, f"has offset {stored.offset}, not a multiple of the alignment {alignment}")
    return TensorEntry(
        name=stored.name,
        shape=stored.shape,
        type=kind,
        offset=start + stored.offset,
        num_bytes=elements // kind.block_elements * kind.block_bytes,
    )


def _check_places(reader: _Reader, tensors: Mapping[str, TensorEntry], *, file_bytes: int) -> None:
    """Every tensor lies inside the file, and no two overlap."""
    end, before = 0, ""
    for info in sorted(tensors.values(), key=lambda info: info.offset):
        field = f"tensor {shown(info.name)}"
        if info.offset < end:
            raise reader.error(field, f"starts at byte {info.offset}, inside tensor {before!r} which ends at {end}")
        end, before = info.offset + info.num_bytes, info.name
        if end > file_bytes:
            raise reader.error(field, f"ends at byte {end}, the file has {file_bytes}: it is truncated or malformed")
