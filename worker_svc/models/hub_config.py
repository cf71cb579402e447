"""A hub folder's `config.json` and tensor names -> the terms of GGUF, in which everything else here thinks.

One table of keys, one of names for each architecture. Guards: a property that would change the result but has no code
here is refused, never ignored; every tensor has a use, or is one that its model does not read either.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from protos.service.gguf_header import Value, shown
from protos.service.safetensors_folder import SafetensorsFolder, StoredTensor
from protos.wire.errors import InvalidModelFile, UnsupportedFeature
from worker_svc.models.model_config import MAX_LAYERS, ModelConfig, read_model_config
from worker_svc.models.weights import ParameterSpec

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
"""By `model_type`."""
_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "use_bidirectional_attention": (None, False),
    "quantization_config": (None,),
}
"""Keys with the values that the layers here compute; True of Qwen2's bias is part of its architecture."""
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,3})\.(.+)\Z", re.ASCII)
_PARTS = {
    "input_layernorm.weight": "attn_norm.weight",
    **{f"self_attn.{part}_proj.{kind}": f"attn_{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")},
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
_GEMMA_PARTS = _PARTS | {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
_UNREAD = re.compile(r".*\.rotary_emb\.inv_freq\Z")
"""Buffers that old files hold and no model reads."""
_GEMMA = "gemma3"


def hub_model_config(folder: SafetensorsFolder) -> ModelConfig:
    """The config of the folder's model.

    Raises:
        InvalidModelFile: a key is missing or out of bounds.
        UnsupportedFeature: another architecture, or what no layer here computes.
    """
    config = folder.config
    model_type = config.get("model_type")
    architecture = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if architecture is None:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedFeature(f"model_type is {shown(model_type)}, known: {known}", field="model_type")
    _refuse_unsupported(config, architecture)
    metadata: dict[str, Value] = {"general.architecture": architecture}
    for key, name in _KEYS.items():
        if config.get(key) is not None:
            metadata[f"{architecture}.{name}"] = _number(config[key], key)
    metadata |= {f"{architecture}.{name}": value for name, value in _rope(config, architecture).items()}
    if architecture == _GEMMA:
        metadata[f"{architecture}.attention.sliding_window"] = _number(config.get("sliding_window"), "sliding_window")
    vocab_size = config.get("vocab_size")
    if type(vocab_size) is not int or vocab_size < 1:
        raise InvalidModelFile(f"vocab_size is {shown(vocab_size)}, must be 1 or more", field="vocab_size")
    found = replace(read_model_config(metadata, vocab_size=vocab_size), rope_interleaved=False)
    return _with_gemmas_layers(found, config) if architecture == _GEMMA else found


def hub_tensors(
    folder: SafetensorsFolder, config: ModelConfig, table: Sequence[ParameterSpec]
) -> dict[str, StoredTensor]:
    """The folder's tensors by their GGUF names.

    Raises:
        InvalidModelFile: a tensor that the architecture has no use for, or one that is missing, the head included where
            the config does not tie it to the embedding; names it as the folder would.
    """
    parts = _GEMMA_PARTS if config.architecture == _GEMMA else _PARTS
    is_tied = bool(folder.config.get("tie_word_embeddings", config.architecture == _GEMMA))
    wanted = {spec.name for spec in table}
    found: dict[str, StoredTensor] = {}
    for name, tensor in folder.tensors.items():
        if _UNREAD.match(name) or (is_tied and name == "lm_head.weight"):
            continue
        ours = _gguf_name(name, parts)
        if ours not in wanted or ours is None:
            raise InvalidModelFile(
                f"tensor {shown(name)} has no use in {config.architecture}", field=f"tensor {name!r}"
            )
        found[ours] = tensor
    needed = [spec.name for spec in table if not spec.is_optional] + ([] if is_tied else ["output.weight"])
    missing = next((name for name in needed if name not in found), None)
    if missing is not None:
        field = f"tensor {_hub_name(missing, parts)!r}"
        raise InvalidModelFile(f"{field} is missing, the architecture needs it", field=field)
    return found


def with_hubs_norms(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Parameters as GGUF has them: Gemma's norms with the 1 that its own code adds."""
    if config.architecture != _GEMMA:
        return dict(tensors)
    return {name: tensor + 1 if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}


def _gguf_name(name: str, parts: Mapping[str, str]) -> str | None:
    layer = _LAYER.match(name)
    if layer is None:
        return _TOP.get(name)
    part = parts.get(layer[2])
    return None if part is None or int(layer[1]) >= MAX_LAYERS else f"blk.{int(layer[1])}.{part}"


def _hub_name(name: str, parts: Mapping[str, str]) -> str:
    """The other way round, for messages."""
    prefix, _, rest = name.partition(".")
    if prefix != "blk":
        return next(hub for hub, ours in _TOP.items() if ours == name)
    number, _, part = rest.partition(".")
    return f"model.layers.{number}.{next(hub for hub, ours in parts.items() if ours == part)}"


def _number(value: Any, key: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidModelFile(f"{key} is {shown(value)}, must be a number", field=key)
    return value


def _refuse_unsupported(config: Mapping[str, Any], architecture: str) -> None:
    for key, allowed in _FIXED.items():
        if config.get(key) not in allowed:
            raise UnsupportedFeature(f"{key} is {shown(config.get(key))}, which no layer here computes", field=key)
    wanted = "gelu_pytorch_tanh" if architecture == _GEMMA else "silu"
    key = "hidden_activation" if architecture == _GEMMA else "hidden_act"
    if config.get(key, wanted) != wanted:
        raise UnsupportedFeature(f"{key} is {shown(config[key])}, supported: {wanted}", field=key)
    if architecture != _GEMMA and config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        message = f"sliding_window is {shown(config['sliding_window'])}, which no layer here computes"
        raise UnsupportedFeature(message, field="sliding_window")


def _rope(config: Mapping[str, Any], architecture: str) -> dict[str, Value]:
    """Bases and scaling, in the old form or the new one, where a model with two bases has them by kind of layer."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise InvalidModelFile(f"rope_parameters is {shown(given)}, must be an object", field="rope_parameters")
    is_split = isinstance(given.get("full_attention"), dict)
    full = given["full_attention"] if is_split else given
    found = dict(_scaling(full))
    if full.get("rope_theta") is not None:
        found["rope.freq_base"] = float(_number(full["rope_theta"], "rope_theta"))
    elif config.get("rope_theta") is not None:
        found["rope.freq_base"] = float(_number(config["rope_theta"], "rope_theta"))
    if architecture == _GEMMA:
        windowed = given.get("sliding_attention") if is_split else {"rope_theta": config.get("rope_local_base_freq")}
        if isinstance(windowed, dict) and windowed.get("rope_theta") is not None:
            found["rope.freq_base_swa"] = float(_number(windowed["rope_theta"], "rope_theta"))
            if dict(_scaling(windowed)):
                raise UnsupportedFeature("rope of windowed layers is scaled, supported: default", field="rope_type")
    return found


def _scaling(parameters: Mapping[str, Any]) -> Iterator[tuple[str, Value]]:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return
    if kind != "linear":
        raise UnsupportedFeature(f"rope_type is {shown(kind)}, supported: default, linear", field="rope_type")
    yield "rope.scaling.type", "linear"
    yield "rope.scaling.factor", float(_number(parameters.get("factor"), "factor"))


def _with_gemmas_layers(found: ModelConfig, config: Mapping[str, Any]) -> ModelConfig:
    """Kinds of layers and the scale of queries as the config says them."""
    scalar = config.get("query_pre_attn_scalar")
    scale = found.query_scale if scalar is None else float(max(_number(scalar, "query_pre_attn_scalar"), 1e-6)) ** -0.5
    return replace(found, layer_windows=_windows(found, config), query_scale=scale)


def _windows(found: ModelConfig, config: Mapping[str, Any]) -> tuple[int, ...]:
    kinds = config.get("layer_types")
    window = max(found.layer_windows, default=0) or int(_number(config.get("sliding_window"), "sliding_window"))
    if kinds is None:
        every = int(_number(config.get("sliding_window_pattern", 6), "sliding_window_pattern"))
        if every < 1:
            raise InvalidModelFile(f"sliding_window_pattern is {every}, must be 1 or more", field="layer_types")
        return tuple(0 if index % every == every - 1 else window for index in range(found.num_layers))
    widths = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != found.num_layers or not all(kind in widths for kind in kinds):
        message = f"layer_types must hold full_attention or sliding_attention for each of {found.num_layers} layers"
        raise InvalidModelFile(message, field="layer_types")
    return tuple(widths[kind] for kind in kinds)
