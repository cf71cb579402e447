"""The Llama family: Llama, Mistral, Qwen2 and SmolLM. One file of wiring over shared layers.

Knows nothing of files, batches or pools. Guards: its parameter table names everything that the layers read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker_svc.forward_context import ForwardContext
from worker_svc.kv.sub_pools import layer_places
from worker_svc.layers.attention import SelfAttention
from worker_svc.layers.mlp import GatedMlp
from worker_svc.layers.norm import RmsNorm
from worker_svc.layers.rotary import RotaryTable, inverse_frequencies
from worker_svc.models.decoder_parts import (
    EMBEDDING,
    OUTPUT_NORM,
    Parameters,
    decoder_table,
    gated_mlp,
    layer_prefix,
    layer_shapes,
    output_head,
    self_attention,
    stacked_qkv,
)
from worker_svc.models.model_config import ModelConfig
from worker_svc.models.weights import ParameterSpec
from worker_svc.numerics import Numerics

_ROPE_FACTORS = "rope_freqs.weight"
_WITH_QKV_BIAS = frozenset({"qwen2"})


def parameter_table(config: ModelConfig) -> list[ParameterSpec]:
    """Every tensor this family reads, with its shape."""
    shapes = layer_shapes(config)
    if config.architecture in _WITH_QKV_BIAS:
        shapes |= {f"attn_{part}.bias": shapes[f"attn_{part}.weight"][:1] for part in "qkv"}
    factors = ParameterSpec(name=_ROPE_FACTORS, shape=(config.head_dim // 2,), is_optional=True)
    return [*decoder_table(config, shapes), factors]


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
    frequencies = inverse_frequencies(config.head_dim, base=config.rope_base)
    if _ROPE_FACTORS in parameters:
        frequencies = frequencies / parameters[_ROPE_FACTORS].cpu()
    return RotaryTable(frequencies, num_positions=config.context_tokens, device=parameters[EMBEDDING].device)


def _layer(config: ModelConfig, parameters: Parameters, numerics: Numerics, *, index: int) -> _Layer:
    prefix = layer_prefix(index)
    epsilon, dtype = config.norm_epsilon, parameters[prefix + "attn_q.weight"].dtype
    bias = _qkv(config, parameters, prefix, kind="bias") if config.architecture in _WITH_QKV_BIAS else None
    weight = _qkv(config, parameters, prefix, kind="weight")
    places = layer_places(config.layer_windows)
    return _Layer(
        attention_norm=RmsNorm(parameters[prefix + "attn_norm.weight"], epsilon=epsilon, dtype=dtype),
        attention=self_attention(config, parameters, numerics, index=index, qkv=(weight, bias), places=places),
        mlp_norm=RmsNorm(parameters[prefix + "ffn_norm.weight"], epsilon=epsilon, dtype=dtype),
        mlp=gated_mlp(parameters, numerics, prefix=prefix, gated=numerics.gated_silu),
    )


def _qkv(config: ModelConfig, parameters: Parameters, prefix: str, *, kind: str) -> Tensor:
    """Q, K and V below each other, with the rows of each head in the order of rotary halves."""
    if not config.rope_interleaved:
        return stacked_qkv(parameters, prefix, kind=kind)
    query, key, value = (parameters[f"{prefix}attn_{part}.{kind}"] for part in "qkv")
    return torch.cat((_to_halves(query, config.head_dim), _to_halves(key, config.head_dim), value))


def _to_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Rows 0 2 4 ... of each head, then 1 3 5 ...: rotary pairs (2i, 2i + 1) become (i, i + head_dim / 2)."""
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
