"""Architecture name -> model family, and a model folder -> a loaded model.

Guards: what is loaded is what the folder's card describes.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from protos.service.gguf_header import GgufHeader, read_gguf_header, shown
from protos.service.model_files import ModelFolder
from protos.service.safetensors_folder import StoredTensor, read_safetensors_folder
from protos.wire.errors import InvalidModelFile, UnsupportedFeature
from worker_svc.forward_context import ForwardContext
from worker_svc.models import gemma3, llama, qwen3
from worker_svc.models.hub_config import hub_model_config, hub_tensors, with_hubs_norms
from worker_svc.models.model_config import ModelConfig, read_model_config
from worker_svc.models.weights import ParameterSpec, check_fingerprint, load_parameters, stored_tensors
from worker_svc.numerics import Numerics

logger = logging.getLogger(__name__)

EMBEDDING = "token_embd.weight"
"""Its height is the width of the logits."""


class Model(Protocol):
    """What a family builds; `model_runner.LanguageModel` is the same contract seen from above."""

    def hidden_states(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size], normalised, owned."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, logits_width] float32, owned."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model file."""

    parameter_table: Callable[[ModelConfig], Sequence[ParameterSpec]]
    build: Callable[[ModelConfig, Mapping[str, Tensor], Numerics], Model]


_LLAMA = Family(parameter_table=llama.parameter_table, build=llama.Llama)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": _LLAMA,
        "qwen2": _LLAMA,
        "qwen3": Family(parameter_table=qwen3.parameter_table, build=llama.Llama),
        "gemma3": Family(parameter_table=gemma3.parameter_table, build=gemma3.Gemma3),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run."""

    model: Model
    config: ModelConfig
    extra_tensors: tuple[str, ...]
    """In the file, but of no use to the family."""


def load_model(folder: ModelFolder, *, numerics: Numerics, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Read the folder's weights and build its model.

    Raises:
        InvalidModelFile: the weight file is damaged, or is not the one the folder was made with.
        UnsupportedFeature: no family here computes this architecture.
    """
    config, stored = _read_weights(folder)
    check_fingerprint(folder.weights, folder.card.weights_fingerprint)
    family = FAMILIES[config.architecture]
    loaded = load_parameters(stored, family.parameter_table(config), dtype=dtype, device=device)
    if loaded.extra:
        logger.warning("tensors without a use", extra={"count": len(loaded.extra), "first": loaded.extra[0]})
    tensors = loaded.tensors if folder.weights.is_file() else with_hubs_norms(loaded.tensors, config)
    model = family.build(config, tensors, numerics)
    return LoadedModel(model=model, config=config, extra_tensors=loaded.extra)


def checked_config(header: GgufHeader, folder: ModelFolder) -> ModelConfig:
    """The config of the weights, which the folder's card must agree with.

    Raises:
        InvalidModelFile: the header is damaged, or describes another model than the card.
        UnsupportedFeature: no family here computes this architecture.
    """
    return _same_as_card(_config(header), folder)


def _read_weights(folder: ModelFolder) -> tuple[ModelConfig, Mapping[str, StoredTensor]]:
    if folder.weights.is_file():
        header = read_gguf_header(folder.weights)
        return checked_config(header, folder), stored_tensors(folder.weights, header)
    hub = read_safetensors_folder(folder.weights)
    config = _same_as_card(hub_model_config(hub), folder)
    return config, hub_tensors(hub, config, FAMILIES[config.architecture].parameter_table(config))


def _same_as_card(config: ModelConfig, folder: ModelFolder) -> ModelConfig:
    if config.context_tokens != folder.card.context_tokens or config.vocab_size != folder.card.vocab_size:
        raise InvalidModelFile(
            "model.json does not describe the weights beside it: fetch the model anew", field="model"
        )
    return config


def _config(header: GgufHeader) -> ModelConfig:
    architecture = header.metadata.get("general.architecture")
    if architecture not in FAMILIES:
        message = f"architecture is {shown(architecture)}, known: {', '.join(FAMILIES)}"
        raise UnsupportedFeature(message, field="general.architecture")
    embedding = header.tensors.get(EMBEDDING)
    if embedding is None:
        raise InvalidModelFile(f"tensor {EMBEDDING!r} is missing", field=EMBEDDING)
    return read_model_config(header.metadata, vocab_size=embedding.shape[0])
