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
from protos.service.model_description import described_folder
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
    weights_bytes: int
    """On the device."""


class ModelSource:
    """A model folder whose headers were checked; its tensors are still to be read."""

    def __init__(self, folder: ModelFolder) -> None:
        """Check the headers.

        Raises:
            InvalidModelFile: the weight file is damaged.
            UnsupportedFeature: no family here computes this model.
        """
        self._folder = folder
        self._described = described_folder(folder)

    @property
    def config(self) -> ModelConfig:
        """Shapes and constants."""
        return self._described.config

    def load(self, *, numerics: Numerics, dtype: torch.dtype, device: torch.device) -> LoadedModel:
        """Read the weights and build their model.

        Raises:
            InvalidModelFile: the weight file is not the one the folder was made with.
        """
        check_fingerprint(self._folder.weights, self._folder.card.weights_fingerprint)
        tensors = load_parameters(self._described.tensors, dtype=dtype, device=device)
        if self._described.header is None:
            tensors = with_hubs_norms(tensors, self.config.architecture)
        model = FAMILIES[self.config.architecture](self.config, tensors, numerics)
        weights_bytes = sum(tensor.nbytes for tensor in tensors.values())
        return LoadedModel(model=model, config=self.config, weights_bytes=weights_bytes)
