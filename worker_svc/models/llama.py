"""The Llama family: Llama, Mistral, Qwen2, Qwen3 and SmolLM. One file of wiring over shared layers.

Knows nothing of files, batches or pools. Which tensors there are says `protos/service/model_tensors.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from protos.service.model_config import ModelConfig
from protos.service.model_tensors import EMBEDDING, OUTPUT_NORM, ROPE_FACTORS, layer_prefix
from worker_svc.forward_context import ForwardContext
from worker_svc.kv.sub_pools import layer_places
from worker_svc.layers.attention import SelfAttention
from worker_svc.layers.mlp import GatedMlp
from worker_svc.layers.norm import RmsNorm
from worker_svc.layers.rotary import RotaryTable, banded_frequencies, inverse_frequencies
from worker_svc.models.decoder_parts import Parameters, gated_mlp, output_head, self_attention, stacked_qkv
from worker_svc.numerics import Numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    attention_norm: RmsNorm
    attention: SelfAttention
    mlp_norm: RmsNorm
    mlp: GatedMlp

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], context: ForwardContext) -> Tensor:
        """The residual stream is float32 whatever the weights are: rounding it is what costs a bfloat16 model most."""
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation, context)
        return hidden.add_(self.mlp(self.mlp_norm(hidden)))


class Llama:
    """A `LanguageModel`. Weights are fixed once it is made."""

    def __init__(self, config: ModelConfig, parameters: Parameters, numerics: Numerics) -> None:
        self._embedding = parameters[EMBEDDING]
        self._rotary = _rotary_table(config, parameters)
        self._layers = [_layer(config, parameters, numerics, index=index) for index in range(config.num_layers)]
        self._norm = RmsNorm(parameters[OUTPUT_NORM], epsilon=config.norm_epsilon, dtype=torch.float32)
        self._head = numerics.product(output_head(parameters))

    def hidden_states(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """See `LanguageModel.hidden_states`."""
        hidden = functional.embedding(input_ids, self._embedding).float()
        rotation = self._rotary.at(positions)
        for layer in self._layers:
            hidden = layer(hidden, rotation, context)
        return self._norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `LanguageModel.logits`."""
        return self._head(hidden)


def _rotary_table(config: ModelConfig, parameters: Parameters) -> RotaryTable:
    rope = config.rope
    frequencies = inverse_frequencies(config.head_dim, base=rope.base) / rope.stretch
    if ROPE_FACTORS in parameters:
        frequencies = frequencies / parameters[ROPE_FACTORS].cpu()
    if rope.bands is not None:
        frequencies = banded_frequencies(frequencies, rope.bands)
    return RotaryTable(frequencies, num_positions=config.context_tokens, device=parameters[EMBEDDING].device)


def _layer(config: ModelConfig, parameters: Parameters, numerics: Numerics, *, index: int) -> _Layer:
    prefix = layer_prefix(index)
    epsilon, dtype = config.norm_epsilon, parameters[prefix + "attn_q.weight"].dtype
    qkv = _qkv(config, parameters, prefix)
    places = layer_places(config.layer_windows)
    return _Layer(
        attention_norm=RmsNorm(parameters[prefix + "attn_norm.weight"], epsilon=epsilon, dtype=dtype),
        attention=self_attention(config, parameters, numerics, index=index, qkv=qkv, places=places),
        mlp_norm=RmsNorm(parameters[prefix + "ffn_norm.weight"], epsilon=epsilon, dtype=dtype),
        mlp=gated_mlp(parameters, numerics, prefix=prefix, gated=numerics.gated_silu),
    )


def _qkv(config: ModelConfig, parameters: Parameters, prefix: str) -> tuple[Tensor, Tensor | None]:
    """Weights of Q, K and V below each other, and biases, with the rows of each head in the order of rotary halves."""
    weight, bias = stacked_qkv(parameters, prefix)
    if not config.rope.is_interleaved:
        return weight, bias
    turned = (config.num_q_heads + config.num_kv_heads) * config.head_dim

    def in_halves(rows: Tensor) -> Tensor:
        return torch.cat((_to_halves(rows[:turned], config.head_dim), rows[turned:]))

    return in_halves(weight), None if bias is None else in_halves(bias)


def _to_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Rows 0 2 4 ... of each head, then 1 3 5 ...: rotary pairs (2i, 2i + 1) become (i, i + head_dim / 2)."""
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
