"""A slow, obvious Llama in float64 NumPy, straight from a GGUF file's parameters: no pages, chunks or batches.

Rotary pairs are those of the file: (2i, 2i + 1) for `llama`, (i, i + head_dim / 2) for `qwen2`.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from tests.support.tiny_llama import Shape


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def _turn(x: np.ndarray, shape: Shape, factors: np.ndarray) -> np.ndarray:
    """[tokens, heads, head_dim] with rotary embedding."""
    half = shape.head_dim // 2
    angles = np.arange(len(x))[:, None] / 10_000.0 ** (np.arange(half) / half) / factors
    turned, index = x.copy(), np.arange(half)
    first, second = (2 * index, 2 * index + 1) if shape.architecture == "llama" else (index, index + half)
    cosines, sines = np.cos(angles)[:, None], np.sin(angles)[:, None]
    turned[..., first] = x[..., first] * cosines - x[..., second] * sines
    turned[..., second] = x[..., second] * cosines + x[..., first] * sines
    return turned


def dense_logits(shape: Shape, weights: Mapping[str, np.ndarray], ids: Sequence[int]) -> np.ndarray:
    """[len(ids), vocab_size]"""
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    count, share = len(ids), shape.num_q_heads // shape.num_kv_heads
    hidden = w["token_embd.weight"][list(ids)]
    factors = w.get("rope_freqs.weight", np.ones(shape.head_dim // 2))
    for layer in range(shape.num_layers):
        p = f"blk.{layer}."
        x = _norm(hidden, w[p + "attn_norm.weight"])
        q, k, v = (x @ w[f"{p}attn_{n}.weight"].T + w.get(f"{p}attn_{n}.bias", 0.0) for n in "qkv")
        q, k, v = (part.reshape(count, -1, shape.head_dim) for part in (q, k, v))
        q, k = _turn(q, shape, factors), _turn(k, shape, factors)
        k, v = np.repeat(k, share, 1), np.repeat(v, share, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(shape.head_dim)
        scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
        hidden = hidden + mixed.reshape(count, -1) @ w[p + "attn_output.weight"].T + w.get(p + "attn_output.bias", 0.0)
        x = _norm(hidden, w[p + "ffn_norm.weight"])
        gate, up = (x @ w[f"{p}ffn_{n}.weight"].T + w.get(f"{p}ffn_{n}.bias", 0.0) for n in ("gate", "up"))
        mixed = (gate / (1 + np.exp(-gate)) * up) @ w[p + "ffn_down.weight"].T
        hidden = hidden + mixed + w.get(p + "ffn_down.bias", 0.0)
    return _norm(hidden, w["output_norm.weight"]) @ w.get("output.weight", w["token_embd.weight"]).T
