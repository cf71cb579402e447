"""Small random models of every family as folders of a model hub: a config, and weights made by rule from their names.

Needs NumPy only: `record_transformers.py` imports it in another environment, where the known answers come from.
"""

import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

WIDTH = 96
PROMPT = [int(token) for token in np.random.default_rng(5).integers(0, WIDTH, 90)]
"""Longer than every window below."""
IDS = list(range(0, WIDTH, 8))
"""Whose log-probabilities are stored, at every position."""

_COMMON = {
    "vocab_size": WIDTH,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GEMMA = {
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    "sliding_window": 24,
    "query_pre_attn_scalar": 16,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "tie_word_embeddings": True,
}

CASES: dict[str, dict[str, Any]] = {
    "llama, grouped queries": {"model_type": "llama"},
    "llama, one kv head, tied": {"model_type": "llama", "num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama, every head its own kv": {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4},
    "llama, biases, tied": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama, turns stretched by bands": {
        "model_type": "llama",
        "head_dim": 32,
        "num_attention_heads": 4,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 48,
        },
    },
    "llama, turns stretched": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral, sliding window": {"model_type": "mistral", "sliding_window": 21},
    "qwen2, biases, tied": {
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "qwen2, windows in every layer": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 33,
        "max_window_layers": 0,
    },
    "qwen2, windows in later layers": {
        "model_type": "qwen2",
        "num_key_value_heads": 1,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "qwen3, biases, windows by layer": {
        "model_type": "qwen3",
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3, norms of heads": {"model_type": "qwen3", "head_dim": 32, "num_attention_heads": 4},
    "qwen3, one kv head, tied": {"model_type": "qwen3", "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gemma3, one kv head": _GEMMA | {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32},
    "gemma3, stretched, other scale of queries": _GEMMA
    | {
        "query_pre_attn_scalar": 40,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 7,
    },
}


def config_of(case: str) -> dict[str, Any]:
    return _COMMON | CASES[case]


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_width, kv_width = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    is_gemma = config["model_type"] == "gemma3_text"
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q_width, hidden),
        "self_attn.k_proj.weight": (kv_width, hidden),
        "self_attn.v_proj.weight": (kv_width, hidden),
        "self_attn.o_proj.weight": (hidden, q_width),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if is_gemma:
        layer |= {"pre_feedforward_layernorm.weight": (hidden,), "post_feedforward_layernorm.weight": (hidden,)}
    if is_gemma or config["model_type"] == "qwen3":
        layer |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    parts = [f"self_attn.{part}_proj" for part in "qkv"] if config["model_type"] == "qwen2" else []
    parts += [f"self_attn.{part}_proj" for part in "qkvo"] if config.get("attention_bias") else []
    parts += [f"mlp.{part}_proj" for part in ("gate", "up", "down")] if config.get("mlp_bias") else []
    layer |= {f"{part}.bias": layer[f"{part}.weight"][:1] for part in parts}
    shapes = {
        f"model.layers.{index}.{name}": shape
        for index in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    shapes |= {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def make_tensors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Random weights; those of norms are around what their model multiplies by 1 with."""
    # Gemma scales it up; a larger one would drown what the layers add.
    embedding = 0.1 if config["model_type"] == "gemma3_text" else 0.3
    found = {}
    for name, shape in tensor_shapes(config).items():
        values = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
        if "norm" in name:
            values = values * 0.3 + (config["model_type"] != "gemma3_text")
        elif len(shape) == 2:
            values = values * (embedding if "embed" in name else 1.5 / shape[1] ** 0.5)
        found[name] = values.astype(np.float32)
    return found


def safetensors_bytes(tensors: Mapping[str, np.ndarray], *, dtype: str = "F32") -> bytes:
    """A file of these tensors; for another `dtype` than F32 their bytes are taken as they are."""
    described, data = {}, b""
    for name, values in tensors.items():
        raw = np.ascontiguousarray(values).tobytes()
        described[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    head = json.dumps(described).encode()
    return struct.pack("<Q", len(head)) + head + data


def write_hub(path: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """The config and one weight file in `path`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return path
