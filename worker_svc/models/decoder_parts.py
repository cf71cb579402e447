"""What the families of decoders share: layers made from named tensors."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from protos.service.model_config import ModelConfig
from protos.service.model_tensors import EMBEDDING, OUTPUT, layer_prefix
from worker_svc.kv.sub_pools import LayerPlace
from worker_svc.layers.attention import AttentionShape, HeadNorms, SelfAttention
from worker_svc.layers.mlp import GatedMlp
from worker_svc.layers.norm import RmsNorm
from worker_svc.numerics import Numerics, Product

Parameters = Mapping[str, Tensor]


def output_head(parameters: Parameters) -> Tensor:
    """The head's matrix, in float32 even for a bfloat16 model: logits near 20 rounded to 8 bits are off by 0.06."""
    return parameters.get(OUTPUT, parameters[EMBEDDING]).float()


def stacked_qkv(parameters: Parameters, prefix: str) -> tuple[Tensor, Tensor | None]:
    """Weights of Q, K and V below each other, as stored, and their biases, if there are some."""

    def stacked(kind: str) -> Tensor:
        return torch.cat([parameters[f"{prefix}attn_{part}.{kind}"] for part in "qkv"])

    return stacked("weight"), stacked("bias") if f"{prefix}attn_q.bias" in parameters else None


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
        output=_product(parameters, numerics, prefix + "attn_output"),
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
    names = [f"{prefix}ffn_{part}" for part in ("gate", "up")]
    weight = torch.cat([parameters[f"{name}.weight"] for name in names])
    has_bias = f"{names[0]}.bias" in parameters
    bias = torch.cat([parameters[f"{name}.bias"] for name in names]) if has_bias else None
    down = _product(parameters, numerics, prefix + "ffn_down")
    return GatedMlp(gate_up=numerics.product(weight, bias), down=down, gated=gated)


def _product(parameters: Parameters, numerics: Numerics, name: str) -> Product:
    """With a bias where there is one."""
    return numerics.product(parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))
