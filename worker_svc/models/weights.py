"""Described tensors, of GGUF or safetensors files -> named parameters in the model's dtype.

Reads through private mappings of the files, whose bounds the header parsers have checked; names, shapes and types were
checked by `protos/service/model_tensors.py`.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from protos.service.gguf_header import TensorEntry
from protos.service.safetensors_folder import StoredTensor, folder_fingerprint
from protos.wire.errors import InvalidModelFile
from worker_svc.models.dequantise import DEQUANTISE

_LARGEST_ELEMENT = 8
_NORMS_WITHOUT_ONE = "gemma3"


def load_parameters(
    tensors: Mapping[str, StoredTensor], *, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Dequantise every tensor from its file, owned. Matrices are of `dtype`, vectors of float32."""
    # Copy-on-write: torch wants writable memory; nothing here writes.
    mappings = {
        path: torch.from_numpy(np.memmap(path, np.uint8, mode="c"))
        for path in sorted({tensor.path for tensor in tensors.values()})
    }
    return {
        name: _dequantised(mappings[tensor.path], tensor.entry).to(
            device, dtype if len(tensor.entry.shape) > 1 else torch.float32
        )
        for name, tensor in tensors.items()
    }


def with_hubs_norms(tensors: Mapping[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """Parameters as GGUF has them: Gemma's norms with the 1 that its own code adds."""
    if architecture != _NORMS_WITHOUT_ONE:
        return dict(tensors)
    return {name: tensor + 1 if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}


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


def _dequantised(mapping: Tensor, info: TensorEntry) -> Tensor:
    raw = mapping[info.offset : info.offset + info.num_bytes]
    if info.offset % _LARGEST_ELEMENT:  # torch looks at aligned memory only, safetensors files promise none
        raw = raw.clone()
    blocks = raw.view(-1, info.type.block_bytes)
    out = torch.empty((len(blocks), info.type.block_elements), dtype=torch.float32)
    DEQUANTISE[info.type.name](blocks, out)
    return out.view(info.shape)
