"""What the families of decoders share: names and shapes of their tensors, and layers made from them."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from worker_svc.kv.sub_pools import LayerPlace
from worker_svc.layers.attention import AttentionShape, HeadNorms, SelfAttention
from worker_svc.layers.mlp import GatedMlp
from worker_svc.layers.norm import RmsNorm
from worker_svc.models.model_config import ModelConfig
from worker_svc.models.weights import ParameterSpec
from worker_svc.numerics import Numerics

Parameters = Mapping[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
EMBEDDING, OUTPUT, OUTPUT_NORM = "token_embd.weight", "output.weight", "output_norm.weight"


def layer_prefix(index: int) -> str:
    """Of the names of a layer's tensors."""
    return f"blk.{index}."


def decoder_table(config: ModelConfig, layer_shapes: Shapes) -> list[ParameterSpec]:
    """Every tensor of a decoder whose layers are alike. Without a head of its own, the embedding is the head."""
    table = [
        ParameterSpec(name=EMBEDDING, shape=(config.vocab_size, config.hidden_size)),
        ParameterSpec(name=OUTPUT_NORM, shape=(config.hidden_size,)),
        ParameterSpec(name=OUTPUT, shape=(config.vocab_size, config.hidden_size), is_optional=True),
    ]
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        table += [ParameterSpec(name=prefix + name, shape=shape) for name, shape in layer_shapes.items()]
    return table


def layer_shapes(config: ModelConfig) -> Shapes:
    """The tensors that every layer of every family has."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
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


def head_norm_shapes(config: ModelConfig) -> Shapes:
    """Norms of the heads, where a family has them."""
    return {"attn_q_norm.weight": (config.head_dim,), "attn_k_norm.weight": (config.head_dim,)}


def output_head(parameters: Parameters) -> Tensor:
    """The head's matrix, in float32 even for a bfloat16 model: logits near 20 rounded to 8 bits are off by 0.06."""
    return parameters.get(OUTPUT, parameters[EMBEDDING]).float()


def stacked_qkv(parameters: Parameters, prefix: str, *, kind: str) -> Tensor:
    """Q, K and V below each other, as stored."""
    return torch.cat([parameters[f"{prefix}attn_{part}.{kind}"] for part in "qkv"])


def self_attention(
    config: ModelConfig,
    parameters: Parameters,
    numerics: Numerics,
    *,
    index: int,
    qkv: tuple[Tensor, Tensor | None],
    places: tuple[LayerPlace, ...],
) -> SelfAttention:
    """The attention of layer `index`; with norms of the heads if there are such weights.

    Args:
        config: shapes and constants.
        parameters: by name.
        numerics: how sums are ordered.
        index: of the layer.
        qkv: weight and bias of the one product of queries, keys and values, heads in the order of rotary halves.
        places: of all layers in the KV pools.
    """
    prefix = layer_prefix(index)
    return SelfAttention(
        AttentionShape(num_q_heads=config.num_q_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim),
        qkv=numerics.product(*qkv),
        output=numerics.product(parameters[prefix + "attn_output.weight"]),
        place=places[index],
        norms=_head_norms(config, parameters, numerics, prefix=prefix),
    )


def _head_norms(config: ModelConfig, parameters: Parameters, numerics: Numerics, *, prefix: str) -> HeadNorms | None:
    if prefix + "attn_q_norm.weight" not in parameters:
        return None
    numerics.check_norm(config.head_dim)
    # Back-ends divide scores by the square root of the head's size; what a model wants beyond that is put in here.
    query = parameters[prefix + "attn_q_norm.weight"] * (config.query_scale * config.head_dim**0.5)
    key = parameters[prefix + "attn_k_norm.weight"]
    epsilon, dtype = config.norm_epsilon, torch.float32
    return HeadNorms(
        queries=RmsNorm(query, epsilon=epsilon, dtype=dtype), keys=RmsNorm(key, epsilon=epsilon, dtype=dtype)
    )


def gated_mlp(
    parameters: Parameters, numerics: Numerics, *, prefix: str, gated: Callable[[Tensor], Tensor]
) -> GatedMlp:
    """The feed-forward part of a layer."""
    gate_up = torch.cat((parameters[prefix + "ffn_gate.weight"], parameters[prefix + "ffn_up.weight"]))
    down = numerics.product(parameters[prefix + "ffn_down.weight"])
    return GatedMlp(gate_up=numerics.product(gate_up), down=down, gated=gated)
