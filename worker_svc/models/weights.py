"""Weight files, GGUF or safetensors -> named parameters in the model's dtype.

Reads through private mappings of the files, whose bounds the header parsers have checked. Knows no architecture.
Guards: every parameter of the table is set exactly once with exactly the table's shape; what is left over is reported.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from protos.service.gguf_header import GgufHeader, TensorEntry
from protos.service.safetensors_folder import StoredTensor, folder_fingerprint
from protos.wire.errors import InvalidModelFile
from worker_svc.models.dequantise import DEQUANTISE

_LARGEST_ELEMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter an architecture needs."""

    name: str
    shape: tuple[int, ...]
    is_optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedParameters:
    """All parameters of a table that the file has, owned."""

    tensors: Mapping[str, Tensor]
    extra: tuple[str, ...]
    """Stored tensors that no parameter asked for."""


def stored_tensors(path: Path, header: GgufHeader) -> dict[str, StoredTensor]:
    """The tensors of one GGUF file."""
    return {name: StoredTensor(path=path, entry=entry) for name, entry in header.tensors.items()}


def load_parameters(
    stored: Mapping[str, StoredTensor], table: Sequence[ParameterSpec], *, dtype: torch.dtype, device: torch.device
) -> LoadedParameters:
    """Dequantise every parameter of `table` from its file. Matrices are of `dtype`, vectors of float32.

    Raises:
        InvalidModelFile: a parameter is missing, has another shape, or a type that cannot be dequantised here.
    """
    chosen = {spec.name: _chosen(stored, spec) for spec in table if spec.name in stored or not spec.is_optional}
    # Copy-on-write: torch wants writable memory; nothing here writes.
    mappings = {
        path: torch.from_numpy(np.memmap(path, np.uint8, mode="c"))
        for path in sorted({tensor.path for tensor in chosen.values()})
    }
    tensors = {
        name: _dequantised(mappings[tensor.path], tensor.entry).to(
            device, dtype if len(tensor.entry.shape) > 1 else torch.float32
        )
        for name, tensor in chosen.items()
    }
    return LoadedParameters(tensors=tensors, extra=tuple(name for name in stored if name not in chosen))


def check_fingerprint(path: Path, expected: str) -> None:
    """Refuse a weight file, or a folder of them, whose SHA-256 is not the one its model folder was made with.

    Raises:
        InvalidModelFile: the file was changed.
    """
    if path.is_dir():
        found = folder_fingerprint(path)
    else:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise InvalidModelFile(f"{path.name}: SHA-256 is {found}, the model card says {expected}", field="weights")


def _chosen(stored: Mapping[str, StoredTensor], spec: ParameterSpec) -> StoredTensor:
    tensor = stored.get(spec.name)
    field = f"tensor {spec.name!r}"
    if tensor is None:
        raise InvalidModelFile(f"{field} is missing, the architecture needs it", field=field)
    info = tensor.entry
    field = f"tensor {info.name!r}"
    if info.shape != spec.shape:
        message = f"{field} has shape {list(info.shape)}, the architecture needs {list(spec.shape)}"
        raise InvalidModelFile(message, field=field)
    if info.type.name not in DEQUANTISE:
        message = f"{field} has type {info.type.name}, supported: {', '.join(DEQUANTISE)}"
        raise InvalidModelFile(message, field=field)
    return tensor


def _dequantised(mapping: Tensor, info: TensorEntry) -> Tensor:
    raw = mapping[info.offset : info.offset + info.num_bytes]
    if info.offset % _LARGEST_ELEMENT:  # torch looks at aligned memory only, safetensors files promise none
        raw = raw.clone()
    blocks = raw.view(-1, info.type.block_bytes)
    out = torch.empty((len(blocks), info.type.block_elements), dtype=torch.float32)
    DEQUANTISE[info.type.name](blocks, out)
    return out.view(info.shape)
