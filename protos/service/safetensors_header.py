"""Reads a safetensors file's header: where tensors lie, never a tensor.

Every length, count, offset and product is checked against a cap or the file's size before it is used. Guards: a header
that is returned describes tensors that lie inside the file and do not overlap; whatever the bytes are, the answer is a
header or `InvalidModelFile`.
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from protos.service.gguf_header import (
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    MAX_NAME_BYTES,
    MAX_TENSOR_ELEMENTS,
    MAX_TENSORS,
    TensorEntry,
    shown,
)
from protos.service.gguf_types import TensorType
from protos.service.json_cost import check_json_cost
from protos.wire.errors import InvalidModelFile

MAX_HEADER_COST = 96 << 20
"""Memory that reading one header may take; 20,000 tensors with long names take a tenth of it."""
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2}
_SIZES |= {"U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
DTYPES: Mapping[str, TensorType] = MappingProxyType({name: TensorType(name, 1, size) for name, size in _SIZES.items()})
"""What an element of each type takes; names are those of GGUF where it has the type."""


def read_safetensors_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of the file at `path`, by name, in the order of their places.

    Raises:
        InvalidModelFile: not safetensors, truncated or malformed; names the field, the value and the limit.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            start = file.read(_LENGTH.size)
            length = _header_length(start, file_bytes=size, label=path.name)
            head = file.read(length)
    except OSError as error:
        raise InvalidModelFile(f"{path.name} cannot be read: {error.strerror}", field="model") from error
    return parse_safetensors_header(head, data_bytes=size - _LENGTH.size - length, label=path.name)


def parse_safetensors_header(head: bytes, *, data_bytes: int, label: str) -> dict[str, TensorEntry]:
    """The tensors described by the JSON in `head`, with offsets from the file's beginning.

    Raises:
        InvalidModelFile: see `read_safetensors_header`.
    """
    described = _parse_json(head, label)
    described.pop(_METADATA, None)
    if len(described) > MAX_TENSORS:
        raise _error(label, "header", f"has {len(described)} tensors, limit {MAX_TENSORS}")
    begin = _LENGTH.size + len(head)
    found = [_entry(name, value, data_bytes=data_bytes, label=label, begin=begin) for name, value in described.items()]
    found.sort(key=lambda entry: entry.offset)
    end, before = begin, ""
    for entry in found:
        if entry.offset < end:
            problem = f"starts at byte {entry.offset}, inside tensor {shown(before)} which ends at {end}"
            raise _error(label, _field(entry.name), problem)
        end, before = entry.offset + entry.num_bytes, entry.name
    return {entry.name: entry for entry in found}


def _header_length(start: bytes, *, file_bytes: int, label: str) -> int:
    if len(start) < _LENGTH.size:
        raise _error(label, "header length", f"needs {_LENGTH.size} bytes, the file has {len(start)}")
    length: int = _LENGTH.unpack(start)[0]
    if length > MAX_HEADER_BYTES:
        raise _error(label, "header length", f"is {length}, limit {MAX_HEADER_BYTES}: this is no safetensors file")
    if length > file_bytes - _LENGTH.size:
        raise _error(label, "header length", f"is {length}, the file has {file_bytes}: it is truncated")
    return length


def _parse_json(head: bytes, label: str) -> dict[str, Any]:
    def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key occurs twice")
        return found

    check_json_cost(head, limit=MAX_HEADER_COST, name=f"{label}: header", field="header")
    try:
        value = json.loads(head, object_pairs_hook=without_twins)
    except RecursionError as error:
        raise _error(label, "header", "is nested too deeply") from error
    except ValueError as error:
        raise _error(label, "header", f"is no JSON: {str(error)[:100]}") from error
    if not isinstance(value, dict):
        raise _error(label, "header", "is no JSON object")
    return value


def _entry(name: str, value: Any, *, data_bytes: int, label: str, begin: int) -> TensorEntry:
    field = _field(name)
    if len(name.encode(errors="surrogatepass")) > MAX_NAME_BYTES:
        raise _error(label, field, f"has a name above {MAX_NAME_BYTES} bytes")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _error(label, field, "must have dtype, shape and data_offsets")
    kind = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if kind is None:
        raise _error(label, field, f"has dtype {shown(value['dtype'])}, which is unknown")
    shape = _sizes(value["shape"])
    if shape is None or not 1 <= len(shape) <= MAX_DIMENSIONS:
        raise _error(label, field, f"has shape {shown(value['shape'])}, must be 1 to {MAX_DIMENSIONS} sizes")
    elements = math.prod(shape)
    if not 1 <= elements <= MAX_TENSOR_ELEMENTS:
        raise _error(label, field, f"has {shown(elements)} elements, limit {MAX_TENSOR_ELEMENTS}")
    offsets = _sizes(value["data_offsets"])
    if offsets is None or len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_bytes:
        raise _error(label, field, f"has data_offsets {shown(value['data_offsets'])}, the file has {data_bytes} bytes")
    num_bytes = elements * kind.block_bytes
    if offsets[1] - offsets[0] != num_bytes:
        raise _error(label, field, f"takes {offsets[1] - offsets[0]} bytes, its shape needs {num_bytes}")
    return TensorEntry(name=name, shape=shape, type=kind, offset=begin + offsets[0], num_bytes=num_bytes)


def _sizes(value: Any) -> tuple[int, ...] | None:
    """Whole numbers, none negative, or None."""
    if not isinstance(value, list) or any(type(number) is not int or number < 0 for number in value):
        return None
    return tuple(value)


def _field(name: str) -> str:
    return f"tensor {shown(name)}"


def _error(label: str, field: str, problem: str) -> InvalidModelFile:
    return InvalidModelFile(f"{label}: {field} {problem}", field=field)
