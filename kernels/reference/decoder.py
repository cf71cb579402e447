"""A whole decoder in plain NumPy float32, without pages: one sequence, all its tokens at once.

The oracle of `NativeModel` with float activations. Weights come dequantised, by role.
"""

from collections.abc import Mapping

import numpy as np

from kernels.native_spec import LayerSpec, NativeModelSpec
from kernels.native_types import Activation, Role

Array = np.ndarray
Weights = Mapping[tuple[Role, int], Array]


def logits(spec: NativeModelSpec, weights: Weights, token_ids: Array) -> Array:
    """[num_tokens, vocab_size] of every position."""
    x = weights[Role.TOKEN_EMBEDDING, -1][token_ids] * np.float32(spec.embedding_scale)
    for index, layer in enumerate(spec.layers):
        own = {role: weight for (role, at), weight in weights.items() if at == index}
        x = x + _post(_attention(spec, layer, own, _norm(x, own[Role.ATTN_NORM], spec)), own, Role.POST_ATTN_NORM, spec)
        x = x + _post(_feed_forward(spec, own, _norm(x, own[Role.FFN_NORM], spec)), own, Role.POST_FFN_NORM, spec)
    output = weights.get((Role.OUTPUT, -1), weights[Role.TOKEN_EMBEDDING, -1])
    return _norm(x, weights[Role.OUTPUT_NORM, -1], spec) @ output.T


def _norm(x: Array, weight: Array, spec: NativeModelSpec) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + spec.rms_epsilon) * weight


def _post(x: Array, own: Mapping[Role, Array], role: Role, spec: NativeModelSpec) -> Array:
    return _norm(x, own[role], spec) if role in own else x


def _attention(spec: NativeModelSpec, layer: LayerSpec, own: Mapping[Role, Array], x: Array) -> Array:
    heads = spec.num_q_heads, spec.num_kv_heads
    q = _heads(x, own, spec, roles=(Role.Q, Role.Q_BIAS, Role.Q_NORM), count=heads[0])
    k = _heads(x, own, spec, roles=(Role.K, Role.K_BIAS, Role.K_NORM), count=heads[1])
    v = _heads(x, own, spec, roles=(Role.V, Role.V_BIAS, None), count=heads[1])
    positions = np.arange(len(x))
    q, k = (_rotate(spec, layer, part, positions) for part in (q, k))
    k, v = (np.repeat(part, heads[0] // heads[1], axis=1) for part in (k, v))
    scores = np.einsum("qhd,khd->hqk", q * spec.attention_scale, k)
    distance = positions[:, None] - positions[None, :]
    hidden = (distance < 0) | ((distance >= layer.window) if layer.window else False)
    scores = np.where(hidden, -np.inf, scores)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
    return mixed.reshape(len(x), -1) @ own[Role.ATTN_OUT].T


def _heads(
    x: Array, own: Mapping[Role, Array], spec: NativeModelSpec, *, roles: tuple[Role, Role, Role | None], count: int
) -> Array:
    weight, bias, norm = roles
    out = x @ own[weight].T
    if bias in own:
        out = out + own[bias]
    out = out.reshape(len(x), count, spec.head_dim)
    return _norm(out, own[norm], spec) if norm is not None and norm in own else out


def _rotate(spec: NativeModelSpec, layer: LayerSpec, x: Array, positions: Array) -> Array:
    half = spec.head_dim // 2
    frequencies = spec.rope_thetas[layer.rope] ** (-np.arange(half) / half)
    angles = (positions[:, None] * frequencies)[:, None, :]
    cosines, sines = np.cos(angles), np.sin(angles)
    out = np.empty_like(x)
    first = slice(0, None, 2) if spec.rope_interleaved else slice(0, half)
    second = slice(1, None, 2) if spec.rope_interleaved else slice(half, None)
    out[..., first] = x[..., first] * cosines - x[..., second] * sines
    out[..., second] = x[..., second] * cosines + x[..., first] * sines
    return out


def _feed_forward(spec: NativeModelSpec, own: Mapping[Role, Array], x: Array) -> Array:
    gate, up = x @ own[Role.GATE].T, x @ own[Role.UP].T
    if spec.activation is Activation.GELU_TANH:
        gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    else:
        gate = gate / (1 + np.exp(-gate))
    return (gate * up) @ own[Role.DOWN].T
