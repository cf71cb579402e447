"""GGUF file -> named parameters in the model's dtype.

Reads through a private mapping of the file, whose bounds the header parser has checked. Knows no architecture. Guards:
every parameter of the table is set exactly once with exactly the table's shape; what is left over is reported.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from protos.service.gguf_header import GgufHeader, TensorEntry
from protos.wire.errors import InvalidModelFile
from worker_svc.models.dequantise import DEQUANTISE


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
    """Tensors of the file that no parameter asked for."""


def load_parameters(
    path: Path, header: GgufHeader, table: Sequence[ParameterSpec], *, dtype: torch.dtype, device: torch.device
) -> LoadedParameters:
    """Dequantise every parameter of `table` from the file at `path`. Matrices are of `dtype`, vectors of float32.

    Raises:
        InvalidModelFile: a parameter is missing, has another shape, or a type that cannot be dequantised here.
    """
    chosen = {spec.name: _chosen(header, spec) for spec in table if spec.name in header.tensors or not spec.is_optional}
    # Copy-on-write: torch wants writable memory; nothing here writes.
    mapping = torch.from_numpy(np.memmap(path, np.uint8, mode="c"))
    tensors = {
        name: _dequantised(mapping, info).to(device, dtype if len(info.shape) > 1 else torch.float32)
        for name, info in chosen.items()
    }
    return LoadedParameters(tensors=tensors, extra=tuple(name for name in header.tensors if name not in chosen))


def check_fingerprint(path: Path, expected: str) -> None:
    """Refuse a weight file whose SHA-256 is not the one its model folder was made with.

    Raises:
        InvalidModelFile: the file was changed.
    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise InvalidModelFile(f"{path.name}: SHA-256 is {found}, the model card says {expected}", field="weights")


def _chosen(header: GgufHeader, spec: ParameterSpec) -> TensorEntry:
    field = f"tensor {spec.name!r}"
    info = header.tensors.get(spec.name)
    if info is None:
        raise InvalidModelFile(f"{field} is missing, the architecture needs it", field=field)
    if info.shape != spec.shape:
        message = f"{field} has shape {list(info.shape)}, the architecture needs {list(spec.shape)}"
        raise InvalidModelFile(message, field=field)
    if info.type.name not in DEQUANTISE:
        message = f"{field} has type {info.type.name}, supported: {', '.join(DEQUANTISE)}"
        raise InvalidModelFile(message, field=field)
    return info


def _dequantised(mapping: Tensor, info: TensorEntry) -> Tensor:
    blocks = mapping[info.offset : info.offset + info.num_bytes].view(-1, info.type.block_bytes)
    out = torch.empty((len(blocks), info.type.block_elements), dtype=torch.float32)
    DEQUANTISE[info.type.name](blocks, out)
    return out.view(info.shape)
