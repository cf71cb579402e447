"""The Gemma 3 family: sliding-window layers with one rope base between full ones with another, norms around every part.

Knows nothing of files, batches or pools. Weights of norms are stored with the 1 that the model's own code adds.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from protos.service.model_config import ModelConfig
from protos.service.model_tensors import EMBEDDING, OUTPUT_NORM, layer_prefix
from worker_svc.forward_context import ForwardContext
from worker_svc.kv.sub_pools import layer_places
from worker_svc.layers.attention import SelfAttention
from worker_svc.layers.mlp import GatedMlp
from worker_svc.layers.norm import RmsNorm
from worker_svc.layers.rotary import RotaryTable, inverse_frequencies
from worker_svc.models.decoder_parts import Parameters, gated_mlp, output_head, self_attention, stacked_qkv
from worker_svc.numerics import Numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    is_windowed: bool
    attention_norm: RmsNorm
    attention: SelfAttention
    after_attention_norm: RmsNorm
    mlp_norm: RmsNorm
    mlp: GatedMlp
    after_mlp_norm: RmsNorm

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], context: ForwardContext) -> Tensor:
        """The residual stream and what is added to it are float32 whatever the weights are."""
        attended = self.attention(self.attention_norm(hidden), rotation, context)
        hidden = hidden + self.after_attention_norm(attended.float())
        return hidden.add_(self.after_mlp_norm(self.mlp(self.mlp_norm(hidden)).float()))


class Gemma3:
    """A `LanguageModel`. Weights are fixed once it is made."""

    def __init__(self, config: ModelConfig, parameters: Parameters, numerics: Numerics) -> None:
        self._embedding = parameters[EMBEDDING]
        self._embedding_scale = config.hidden_size**0.5
        self._full_rotary, self._window_rotary = _rotary_tables(config, device=self._embedding.device)
        self._layers = [_layer(config, parameters, numerics, index=index) for index in range(config.num_layers)]
        self._norm = RmsNorm(parameters[OUTPUT_NORM], epsilon=config.norm_epsilon, dtype=torch.float32)
        self._head = numerics.product(output_head(parameters))

    def hidden_states(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """See `LanguageModel.hidden_states`."""
        hidden = functional.embedding(input_ids, self._embedding).float() * self._embedding_scale
        full, windowed = self._full_rotary.at(positions), self._window_rotary.at(positions)
        for layer in self._layers:
            hidden = layer(hidden, windowed if layer.is_windowed else full, context)
        return self._norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `LanguageModel.logits`."""
        return self._head(hidden)


def _rotary_tables(config: ModelConfig, *, device: torch.device) -> tuple[RotaryTable, RotaryTable]:
    """Of full layers, whose positions may be stretched, and of windowed ones."""
    full = inverse_frequencies(config.head_dim, base=config.rope.base) / config.rope.stretch
    windowed = inverse_frequencies(config.head_dim, base=config.rope.window_base)
    count = config.context_tokens
    return (
        RotaryTable(full, num_positions=count, device=device),
        RotaryTable(windowed, num_positions=count, device=device),
    )


def _layer(config: ModelConfig, parameters: Parameters, numerics: Numerics, *, index: int) -> _Layer:
    prefix = layer_prefix(index)
    dtype = parameters[prefix + "attn_q.weight"].dtype
    numerics.check_norm(config.hidden_size)
    qkv = stacked_qkv(parameters, prefix)

    def norm(name: str, dtype: torch.dtype) -> RmsNorm:
        return RmsNorm(parameters[prefix + name], epsilon=config.norm_epsilon, dtype=dtype)

    return _Layer(
        is_windowed=config.layer_windows[index] > 0,
        attention_norm=norm("attn_norm.weight", dtype),
        attention=self_attention(
            config, parameters, numerics, index=index, qkv=qkv, places=layer_places(config.layer_windows)
        ),
        after_attention_norm=norm("post_attention_norm.weight", torch.float32),
        mlp_norm=norm("ffn_norm.weight", dtype),
        mlp=gated_mlp(parameters, numerics, prefix=prefix, gated=numerics.gated_gelu),
        after_mlp_norm=norm("post_ffw_norm.weight", torch.float32),
    )
