"""A hub folder's `config.json` and tensor names -> the terms of GGUF, in which everything else here thinks.

One table of keys, one of names for each architecture. Guards: a property that would change the result but has no code
in the worker is refused, never ignored; every tensor has a use, or is one that its model does not read either; messages
speak of the folder's own keys and names.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from protos.service.gguf_header import Value, said, shown
from protos.service.hub_rope import rope_bands, rope_metadata
from protos.service.hub_values import integer, number, one_of
from protos.service.model_config import (
    MAX_CONTEXT_TOKENS,
    MAX_LAYERS,
    MAX_VOCABULARY,
    ModelBiases,
    ModelConfig,
    read_model_config,
)
from protos.service.model_tensors import EMBEDDING, OUTPUT, OUTPUT_NORM, ParameterSpec, layer_prefix
from protos.service.safetensors_folder import CONFIG_FILE, SafetensorsFolder, StoredTensor
from protos.wire.errors import InvalidModelFile, UnsupportedFeature

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
_NAMES = {ours: key for key, ours in _KEYS.items()} | {
    "rope.freq_base_swa": "rope_local_base_freq",
    "rope.scaling.factor": "factor",
    "attention.sliding_window": "sliding_window",
}
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "use_bidirectional_attention": (None, False),
    "quantization_config": (None,),
    # What the weights were saved as; the files say it too, and a value of another kind would be a guess.
    "torch_dtype": (None, "float32", "float16", "bfloat16"),
    "dtype": (None, "float32", "float16", "bfloat16"),
    "tie_word_embeddings": (None, False, True),
    "use_sliding_window": (None, False, True),
}
"""Keys with the values that the worker's layers compute."""
_BIASED_ATTENTION = frozenset({"llama", "qwen3", "gemma3_text"})
"""Whose `attention_bias` gives queries, keys, values and output a bias."""
_BIASED_MLP = frozenset({"llama"})
_TOP = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.norm.weight": OUTPUT_NORM,
    "lm_head.weight": OUTPUT,
}
_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,3})\.(.+)\Z", re.ASCII)
_PARTS = {
    "input_layernorm.weight": "attn_norm.weight",
    **{f"self_attn.{part}_proj.{kind}": f"attn_{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")},
    **{f"self_attn.o_proj.{kind}": f"attn_output.{kind}" for kind in ("weight", "bias")},
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    **{
        f"mlp.{part}_proj.{kind}": f"ffn_{part}.{kind}"
        for part in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
_GEMMA_PARTS = _PARTS | {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
_UNREAD = re.compile(r".*\.rotary_emb\.inv_freq\Z")
"""Buffers that old files hold and no model reads."""
_GEMMA, _GEMMA_TYPE = "gemma3", "gemma3_text"
_WINDOWED = frozenset({"mistral", "qwen2", "qwen3", _GEMMA_TYPE})
"""Whose `sliding_window` means something."""
_FULL_KIND, _WINDOW_KIND = "full_attention", "sliding_attention"
_DEFAULT_WINDOW, _DEFAULT_FULL_LAYERS, _DEFAULT_PATTERN = 4096, 28, 6
"""What these families' own code takes where the config says nothing."""


def hub_model_config(folder: SafetensorsFolder) -> ModelConfig:
    """The config of the folder's model.

    Raises:
        InvalidModelFile: a key is missing or out of bounds.
        UnsupportedFeature: another architecture, or what no layer computes.
    """
    config = folder.config
    model_type = _model_type(config)
    architecture = ARCHITECTURES[model_type]
    is_gemma = architecture == _GEMMA
    _refuse_unsupported(config, model_type)
    metadata: dict[str, Value] = {"general.architecture": architecture}
    for key, name in _KEYS.items():
        if config.get(key) is not None:
            metadata[f"{architecture}.{name}"] = number(config[key], key)
    if is_gemma:
        metadata[f"{architecture}.attention.sliding_window"] = _window(config)
    metadata |= {f"{architecture}.{name}": value for name, value in rope_metadata(config, has_windows=is_gemma).items()}
    vocab_size = integer(config.get("vocab_size"), "vocab_size", low=1, high=MAX_VOCABULARY)
    found = read_model_config(metadata, vocab_size=vocab_size, named=partial(_hub_key, architecture=architecture))
    return replace(
        found,
        rope=replace(found.rope, is_interleaved=False, bands=rope_bands(config)),
        layer_windows=_layer_windows(config, model_type, found),
        query_scale=_query_scale(config, found),
        biases=_biases(config, model_type),
    )


def hub_tensors(
    folder: SafetensorsFolder, config: ModelConfig, table: Sequence[ParameterSpec]
) -> dict[str, StoredTensor]:
    """The folder's tensors by their GGUF names.

    Raises:
        InvalidModelFile: a tensor that the architecture has no use for, one that is missing, the head included where
            the config does not tie it to the embedding, or one of another vocabulary; names it as the folder would.
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
            message = f"{tensor.path.name}: tensor {shown(name)} has no use in a model as {CONFIG_FILE} describes it"
            raise InvalidModelFile(message, field=f"tensor {name!r}")
        found[ours] = tensor
    needed = [spec.name for spec in table if not spec.is_optional] + ([] if is_tied else [OUTPUT])
    missing = next((name for name in needed if name not in found), None)
    if missing is not None:
        field = f"tensor {_hub_name(missing, parts)!r}"
        message = f"{folder.path.resolve().name}: {field} is missing, a model as {CONFIG_FILE} describes it needs it"
        raise InvalidModelFile(message, field=field)
    _check_vocabulary(found, config)
    return found


def _check_vocabulary(found: Mapping[str, StoredTensor], config: ModelConfig) -> None:
    """The commonest mistake, said in its own words: a tokenizer was changed and one of the files was not."""
    for name in (EMBEDDING, OUTPUT):
        tensor = found.get(name)
        if tensor is not None and tensor.entry.shape[0] != config.vocab_size:
            message = (
                f"{tensor.path.name}: tensor {tensor.entry.name!r} has {tensor.entry.shape[0]} rows, vocab_size in "
                f"{CONFIG_FILE} is {config.vocab_size}"
            )
            raise InvalidModelFile(message, field="vocab_size")


def _gguf_name(name: str, parts: Mapping[str, str]) -> str | None:
    layer = _LAYER.match(name)
    if layer is None:
        return _TOP.get(name)
    part = parts.get(layer[2])
    return None if part is None or int(layer[1]) >= MAX_LAYERS else f"{layer_prefix(int(layer[1]))}{part}"


def _hub_name(name: str, parts: Mapping[str, str]) -> str:
    """The other way round, for messages."""
    prefix, _, rest = name.partition(".")
    if prefix != "blk":
        return next(hub for hub, ours in _TOP.items() if ours == name)
    number_, _, part = rest.partition(".")
    return f"model.layers.{number_}.{next(hub for hub, ours in parts.items() if ours == part)}"


def _hub_key(key: str, *, architecture: str) -> str:
    """What a key of GGUF is called in the config."""
    ours = key.removeprefix(f"{architecture}.")
    return _NAMES.get(ours, ours)


def _model_type(config: Mapping[str, Any]) -> str:
    found = config.get("model_type")
    if not isinstance(found, str) or found not in ARCHITECTURES:
        message = f"model_type {said(found)}, supported: {', '.join(ARCHITECTURES)}"
        raise UnsupportedFeature(message, field="model_type")
    return found


def _refuse_unsupported(config: Mapping[str, Any], model_type: str) -> None:
    for key, allowed in _FIXED.items():
        one_of(config.get(key), key, allowed)
    is_gemma = ARCHITECTURES[model_type] == _GEMMA
    wanted, key = ("gelu_pytorch_tanh", "hidden_activation") if is_gemma else ("silu", "hidden_act")
    one_of(config.get(key, wanted), key, (wanted,))
    for key, families in (("attention_bias", _BIASED_ATTENTION), ("mlp_bias", _BIASED_MLP)):
        one_of(config.get(key), key, (None, False, True) if model_type in families else (None, False))
    if model_type not in _WINDOWED:
        one_of(config.get("sliding_window"), "sliding_window", (None,))


def _biases(config: Mapping[str, Any], model_type: str) -> ModelBiases:
    if model_type == "qwen2":
        return ModelBiases(qkv=True)
    attention = bool(config.get("attention_bias"))
    return ModelBiases(qkv=attention, output=attention, mlp=bool(config.get("mlp_bias")))


def _query_scale(config: Mapping[str, Any], found: ModelConfig) -> float:
    scalar = config.get("query_pre_attn_scalar") if found.architecture == _GEMMA else None
    if scalar is None:
        return found.query_scale
    wanted = float(max(number(scalar, "query_pre_attn_scalar"), 1e-6))
    return 1 / math.sqrt(wanted)


def _window(config: Mapping[str, Any], default: int | None = None) -> int:
    return integer(config.get("sliding_window", default), "sliding_window", low=1, high=MAX_CONTEXT_TOKENS)


def _layer_windows(config: Mapping[str, Any], model_type: str, found: ModelConfig) -> tuple[int, ...]:
    """Of each layer; a window as wide as the context hides nothing."""
    kinds = _kinds_of_layers(config, model_type, found.num_layers)
    if _WINDOW_KIND not in kinds:
        return (0,) * found.num_layers
    window = _window(config, None if found.architecture == _GEMMA else _DEFAULT_WINDOW)
    if window >= found.context_tokens:
        return (0,) * found.num_layers
    return tuple(window if kind == _WINDOW_KIND else 0 for kind in kinds)


def _kinds_of_layers(config: Mapping[str, Any], model_type: str, count: int) -> Sequence[str]:
    """As each family's own code decides them."""
    if model_type == "mistral":
        is_windowed = config.get("sliding_window", _DEFAULT_WINDOW) is not None
        return (_WINDOW_KIND if is_windowed else _FULL_KIND,) * count
    if model_type not in _WINDOWED or (model_type != _GEMMA_TYPE and not config.get("use_sliding_window")):
        return (_FULL_KIND,) * count
    given = config.get("layer_types")
    if given is not None:
        return _given_kinds(given, count)
    if model_type == _GEMMA_TYPE:
        pattern = config.get("sliding_window_pattern", _DEFAULT_PATTERN)
        every = integer(pattern, "sliding_window_pattern", low=1, high=MAX_LAYERS)
        return [_FULL_KIND if index % every == every - 1 else _WINDOW_KIND for index in range(count)]
    first = integer(config.get("max_window_layers", _DEFAULT_FULL_LAYERS), "max_window_layers", low=0, high=1 << 31)
    return [_WINDOW_KIND if index >= first else _FULL_KIND for index in range(count)]


def _given_kinds(given: Any, count: int) -> Sequence[str]:
    known = (_FULL_KIND, _WINDOW_KIND)
    if not isinstance(given, list) or len(given) != count or not all(kind in known for kind in given):
        message = f"layer_types must hold {_FULL_KIND} or {_WINDOW_KIND} for each of {count} layers"
        raise InvalidModelFile(message, field="layer_types")
    return given
