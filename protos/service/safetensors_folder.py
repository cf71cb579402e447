"""A folder as model hubs lay it out: `config.json`, one or several safetensors files, `tokenizer.json`.

Finds and checks; opens no tensor. Guards: every tensor is in one file only, files lie in the folder itself, and texts
are read up to a cap.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.service.gguf_header import TensorEntry, shown
from protos.service.json_cost import check_json_cost
from protos.service.safetensors_header import read_safetensors_header
from protos.wire.errors import InvalidModelFile

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
MAX_TEXT_BYTES = 16 << 20
MAX_TEXT_COST = 96 << 20
MAX_FILES = 1000
_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor and the file it is in."""

    path: Path
    entry: TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsFolder:
    """A checked folder."""

    path: Path
    config: Mapping[str, Any]
    """`config.json`, unchecked beyond being an object."""
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    """By the name in the file."""


def is_safetensors_folder(path: Path) -> bool:
    """Whether `path` looks like one."""
    return (path / CONFIG_FILE).is_file()


def read_safetensors_folder(path: Path) -> SafetensorsFolder:
    """The folder at `path`.

    Raises:
        InvalidModelFile: a file is missing or malformed; names it.
    """
    config = read_json_object(path / CONFIG_FILE)
    index = read_json_object(path / INDEX_FILE) if (path / INDEX_FILE).is_file() else None
    files = _files(path, index)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, entry in read_safetensors_header(file).items():
            if name in tensors:
                message = f"tensor {shown(name)} is in {tensors[name].path.name} and in {file.name}"
                raise InvalidModelFile(message, field=file.name)
            tensors[name] = StoredTensor(path=file, entry=entry)
    if index is not None:
        _check_index(index, tensors)
    return SafetensorsFolder(path=path, config=config, files=files, tensors=tensors)


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in the JSON file at `path`.

    Raises:
        InvalidModelFile: it cannot be read, is too large, or holds no object.
    """
    try:
        size = path.stat().st_size
        if size > MAX_TEXT_BYTES:
            raise InvalidModelFile(f"{path.name} has {size} bytes, limit {MAX_TEXT_BYTES}", field=path.name)
        content = path.read_bytes()
        check_json_cost(content, limit=MAX_TEXT_COST, name=path.name, field=path.name)
        value = json.loads(content)
    except OSError as error:
        raise InvalidModelFile(f"{path.name} cannot be read: {error.strerror}", field=path.name) from error
    except (ValueError, RecursionError) as error:
        raise InvalidModelFile(f"{path.name} is no JSON that can be read", field=path.name) from error
    if not isinstance(value, dict):
        raise InvalidModelFile(f"{path.name} holds no JSON object", field=path.name)
    return value


def folder_fingerprint(path: Path) -> str:
    """SHA-256 over the config and all weight files, names included, hex.

    Raises:
        InvalidModelFile: the folder is not complete.
    """
    index = read_json_object(path / INDEX_FILE) if (path / INDEX_FILE).is_file() else None
    digest = hashlib.sha256()
    for file in (path / CONFIG_FILE, *_files(path, index)):
        try:
            with file.open("rb") as source:
                content = hashlib.file_digest(source, "sha256").hexdigest()
        except OSError as error:
            raise InvalidModelFile(f"{file.name} cannot be read: {error.strerror}", field=file.name) from error
        digest.update(f"{file.name} {content}\n".encode())
    return digest.hexdigest()


def _files(path: Path, index: Mapping[str, Any] | None) -> tuple[Path, ...]:
    if index is None:
        names = sorted(file.name for file in path.glob(f"model*{_SUFFIX}"))
    else:
        names = sorted(set(_weight_map(index).values()))
    if not names:
        missing = f"it has no model*{_SUFFIX} file" if index is None else f"{INDEX_FILE} names no file"
        message = f"{path.name} is no model folder: {missing}"
        raise InvalidModelFile(message, field="model")
    if len(names) > MAX_FILES:
        message = f"{path.name} has {len(names)} files model*{_SUFFIX}, must be 1 to {MAX_FILES}"
        raise InvalidModelFile(message, field="model")
    for name in names:
        if Path(name).name != name or not name.endswith(_SUFFIX):
            raise InvalidModelFile(f"{INDEX_FILE} names {shown(name)}, no *{_SUFFIX} file beside it", field=INDEX_FILE)
        if not (path / name).is_file():
            raise InvalidModelFile(f"{path.name} has no {shown(name)}", field=INDEX_FILE)
    return tuple(path / name for name in names)


def _weight_map(index: Mapping[str, Any]) -> dict[str, str]:
    found = index.get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise InvalidModelFile(f"{INDEX_FILE}: weight_map must give a file for each tensor", field="weight_map")
    return found


def _check_index(index: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    for name, file in _weight_map(index).items():
        found = tensors.get(name)
        if found is None or found.path.name != file:
            raise InvalidModelFile(f"tensor {shown(name)} is not in {shown(file)}, as the index says", field=INDEX_FILE)
