"""GGUF file -> what the native kernels are made from: the shape in their terms, and every tensor's bytes as stored.

Guards: the file is the one its model folder was made with, and a model whose parts the kernels do not compute is
refused before anything is packed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kernels.errors import KernelError
from kernels.native_spec import NativeModelSpec, RawTensor, spec_from_metadata
from protos.service.gguf_types import TENSOR_TYPES
from protos.service.model_config import ModelConfig
from protos.service.model_description import described_folder
from protos.service.model_files import ModelFolder
from protos.service.safetensors_folder import StoredTensor
from protos.wire.errors import UnsupportedFeature
from worker_svc.kv.sub_pools import layer_places
from worker_svc.models.weights import check_fingerprint

_TYPE_NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NativeSource:
    """A model's shape and its tensors, a private mapping of the file."""

    config: ModelConfig
    spec: NativeModelSpec
    weights: dict[str, RawTensor]


def native_source(folder: ModelFolder) -> NativeSource:
    """Read the folder's header and map its tensors.

    Raises:
        InvalidModelFile: the weight file is damaged, or is not the one the folder was made with.
        UnsupportedFeature: the native kernels do not compute this model; torch may.
    """
    described = described_folder(folder)
    config, header = described.config, described.header
    if header is None:
        raise UnsupportedFeature("the native kernels read GGUF files, the weights are safetensors", field="kernels")
    try:
        spec = spec_from_metadata(header.metadata, vocab_size=config.vocab_size)
    except KernelError as error:
        raise UnsupportedFeature(str(error), field="kernels") from error
    _check_same_model(spec, config)
    check_fingerprint(folder.weights, folder.card.weights_fingerprint)
    return NativeSource(config=config, spec=spec, weights=_raw_tensors(folder, described.tensors))


def _check_same_model(spec: NativeModelSpec, config: ModelConfig) -> None:
    """The kernels' own reading of the metadata must be the one that torch would compute."""
    for name, theirs, ours in (
        ("sliding windows", tuple(layer.window for layer in spec.layers), config.layer_windows),
        ("sub-pools", tuple(layer.group for layer in spec.layers), _sub_pools(config)),
        ("scale of queries", spec.attention_scale, config.query_scale),
        ("stretch of positions", 1.0, config.rope.stretch),
        ("rope bases", {*spec.rope_thetas}, {config.rope.base, config.rope.window_base}),
    ):
        if theirs != ours:
            raise UnsupportedFeature(f"the native kernels lack the model's {name}", field="kernels")


def _sub_pools(config: ModelConfig) -> tuple[int, ...]:
    return tuple(place.sub_pool for place in layer_places(config.layer_windows))


def _raw_tensors(folder: ModelFolder, tensors: Mapping[str, StoredTensor]) -> dict[str, RawTensor]:
    mapping = np.memmap(folder.weights, np.uint8, mode="r")
    return {
        name: RawTensor(
            type=_TYPE_NUMBERS[tensor.entry.type.name],
            data=mapping[tensor.entry.offset : tensor.entry.offset + tensor.entry.num_bytes],
        )
        for name, tensor in tensors.items()
    }
