"""Architecture name -> model family, and described weights -> a loaded model.

Guards: what is loaded is what the folder was made with.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from protos.service.model_config import ModelConfig
from protos.service.model_description import DescribedWeights, described_folder
from protos.service.model_files import ModelFolder
from worker_svc.forward_context import ForwardContext
from worker_svc.models import gemma3, llama
from worker_svc.models.weights import check_fingerprint, load_parameters, with_hubs_norms
from worker_svc.numerics import Numerics


class Model(Protocol):
    """What a family builds; `model_runner.LanguageModel` is the same contract seen from above."""

    def hidden_states(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size], normalised, owned."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, logits_width] float32, owned."""
        ...


Family = Callable[[ModelConfig, Mapping[str, Tensor], Numerics], Model]
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {"llama": llama.Llama, "qwen2": llama.Llama, "qwen3": llama.Llama, "gemma3": gemma3.Gemma3}
)
"""By architecture: all that `protos/service/model_tensors.py` describes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run."""

    model: Model
    config: ModelConfig


def load_model(folder: ModelFolder, *, numerics: Numerics, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Check the folder's weights, read them and build their model.

    Raises:
        InvalidModelFile: the weight file is damaged, or is not the one the folder was made with.
        UnsupportedFeature: no family here computes this model.
    """
    return load_described(folder, described_folder(folder), numerics=numerics, dtype=dtype, device=device)


def load_described(
    folder: ModelFolder, described: DescribedWeights, *, numerics: Numerics, dtype: torch.dtype, device: torch.device
) -> LoadedModel:
    """Read the folder's weights, which have been described, and build their model.

    Args:
        folder: that holds them.
        described: what they are.
        numerics: how sums are ordered.
        dtype: of matrices and activations.
        device: where they are put.

    Raises:
        InvalidModelFile: the weight file is not the one the folder was made with.
    """
    config = described.config
    check_fingerprint(folder.weights, folder.card.weights_fingerprint)
    tensors = load_parameters(described.tensors, dtype=dtype, device=device)
    if described.header is None:
        tensors = with_hubs_norms(tensors, config.architecture)
    return LoadedModel(model=FAMILIES[config.architecture](config, tensors, numerics), config=config)
