"""The Llama family: Llama, Mistral, Qwen2 and SmolLM. One file of wiring over shared layers.

Knows nothing of files, batches or pools. Guards: its parameter table names everything that the layers read.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker_svc.forward_context import ForwardContext
from worker_svc.layers.attention import AttentionShape, SelfAttention
from worker_svc.layers.mlp import GatedMlp
from worker_svc.layers.norm import RmsNorm
from worker_svc.layers.rotary import RotaryTable, inverse_frequencies
from worker_svc.models.model_config import ModelConfig
from worker_svc.models.weights import ParameterSpec
from worker_svc.numerics import Numerics

Parameters = Mapping[str, Tensor]
_ROPE_FACTORS = "rope_freqs.weight"
_INTERLEAVED = frozenset({"llama"})
"""Architectures whose files hold the rows of Q and K reordered for rotary pairs (2i, 2i + 1)."""
_WITH_QKV_BIAS = frozenset({"qwen2"})


def parameter_table(config: ModelConfig) -> list[ParameterSpec]:
    """Every tensor this family reads, with its shape."""
    table = [
        ParameterSpec(name="token_embd.weight", shape=(config.vocab_size, config.hidden_size)),
        ParameterSpec(name="output_norm.weight", shape=(config.hidden_size,)),
        ParameterSpec(name="output.weight", shape=(config.vocab_size, config.hidden_size), is_optional=True),
        ParameterSpec(name=_ROPE_FACTORS, shape=(config.head_dim // 2,), is_optional=True),
    ]
    for layer in range(config.num_layers):
        table += _layer_table(config, f"blk.{layer}.")
    return table


def _layer_table(config: ModelConfig, prefix: str) -> list[ParameterSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (q_width, hidden),
        "attn_k.weight": (kv_width, hidden),
        "attn_v.weight": (kv_width, hidden),
        "attn_output.weight": (hidden, q_width),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }
    if config.architecture in _WITH_QKV_BIAS:
        shapes |= {"attn_q.bias": (q_width,), "attn_k.bias": (kv_width,), "attn_v.bias": (kv_width,)}
    return [ParameterSpec(name=prefix + name, shape=shape) for name, shape in shapes.items()]


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
        self._embedding = parameters["token_embd.weight"]
        self._rotary = _rotary_table(config, parameters)
        self._layers = [_layer(config, parameters, numerics, index=index) for index in range(config.num_layers)]
        self._norm = RmsNorm(parameters["output_norm.weight"], epsilon=config.norm_epsilon, dtype=torch.float32)
        # In float32 even for a bfloat16 model: logits near 20 rounded to 8 bits are off by 0.06.
        self._head = numerics.product(parameters.get("output.weight", self._embedding).float())

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
    embedding = parameters["token_embd.weight"]
    frequencies = inverse_frequencies(config.head_dim, base=config.rope_base)
    if _ROPE_FACTORS in parameters:
        frequencies = frequencies / parameters[_ROPE_FACTORS].cpu()
    return RotaryTable(frequencies, num_positions=config.context_tokens, device=embedding.device)


def _layer(config: ModelConfig, parameters: Parameters, numerics: Numerics, *, index: int) -> _Layer:
    prefix = f"blk.{index}."
    shape = AttentionShape(num_q_heads=config.num_q_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
    dtype = parameters[prefix + "attn_q.weight"].dtype
    biases = _qkv(config, parameters, prefix, kind="bias") if config.architecture in _WITH_QKV_BIAS else None
    qkv = numerics.product(_qkv(config, parameters, prefix, kind="weight"), biases)
    gate_up = torch.cat((parameters[prefix + "ffn_gate.weight"], parameters[prefix + "ffn_up.weight"]))
    return _Layer(
        attention_norm=RmsNorm(parameters[prefix + "attn_norm.weight"], epsilon=config.norm_epsilon, dtype=dtype),
        attention=SelfAttention(
            shape, qkv=qkv, output=numerics.product(parameters[prefix + "attn_output.weight"]), layer=index
        ),
        mlp_norm=RmsNorm(parameters[prefix + "ffn_norm.weight"], epsilon=config.norm_epsilon, dtype=dtype),
        mlp=GatedMlp(
            gate_up=numerics.product(gate_up),
            down=numerics.product(parameters[prefix + "ffn_down.weight"]),
            numerics=numerics,
        ),
    )


def _qkv(config: ModelConfig, parameters: Parameters, prefix: str, *, kind: str) -> Tensor:
    """Q, K and V below each other, with the rows of each head in the order of rotary halves."""
    query, key, value = (parameters[f"{prefix}attn_{part}.{kind}"] for part in "qkv")
    if config.architecture in _INTERLEAVED:
        query, key = _to_halves(query, config.head_dim), _to_halves(key, config.head_dim)
    return torch.cat((query, key, value))


def _to_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Rows 0 2 4 ... of each head, then 1 3 5 ...: rotary pairs (2i, 2i + 1) become (i, i + head_dim / 2)."""
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
