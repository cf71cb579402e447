"""GGUF metadata -> frozen ModelConfig.

The one place that knows metadata keys of weights. Guards: every number is inside the bounds the layers rely on, and a
property that would change the result but has no code in the worker is refused, never ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from protos.service.gguf_header import Value, said, shown
from protos.wire.errors import InvalidModelFile, UnsupportedFeature

MAX_LAYERS = 512
MAX_WIDTH = 1 << 17
MAX_VOCABULARY = 1 << 21
MAX_CONTEXT_TOKENS = 1 << 20
MAX_NUMBER = 1e12

_INTERLEAVED = frozenset({"llama"})
_WINDOWED = frozenset({"gemma3"})
_FULL_EVERY = 6
_WINDOW_ROPE_BASE = 10_000.0
_GEMMA_27B_LAYERS = 62
_SCALINGS = ("none", "linear")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeBands:
    """How Llama 3 stretches: slow turns by the whole factor, fast ones not at all, those between by a part of it."""

    factor: float
    low_freq_factor: float
    """Turns that take longer than the first context divided by it are slow."""
    high_freq_factor: float
    """Turns that take less than the first context divided by it are fast."""
    first_context_tokens: int
    """Of the model before it was stretched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions turn queries and keys."""

    base: float
    """Of layers that see everything."""
    window_base: float
    """Of layers with a window, in families whose windowed layers have their own."""
    is_interleaved: bool
    """The weights hold the rows of Q and K reordered for rotary pairs (2i, 2i + 1)."""
    stretch: float = 1.0
    """Positions of layers that see everything are divided by it."""
    bands: RopeBands | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBiases:
    """Products that add a bias."""

    qkv: bool = False
    output: bool = False
    """Of attention."""
    mlp: bool = False
    """All three of the feed-forward part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of a decoder."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    norm_epsilon: float
    rope: RopeConfig
    layer_windows: tuple[int, ...]
    """Of each layer: tokens it sees, the row's own included; 0: all."""
    query_scale: float
    """Scores are products of queries and keys times this."""
    biases: ModelBiases = ModelBiases()


def _as_stored(key: str) -> str:
    return key


def read_model_config(
    metadata: Mapping[str, Value], *, vocab_size: int, named: Callable[[str], str] = _as_stored
) -> ModelConfig:
    """The config in a GGUF file's metadata, without biases, which only its tensors tell.

    Args:
        metadata: with `general.architecture`, which is known, and the keys below it.
        vocab_size: the embedding's height.
        named: what a key below the architecture is called where the numbers come from.

    Raises:
        InvalidModelFile: a key is missing or out of bounds; names key, value and limit.
        UnsupportedFeature: the weights need what no layer computes.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise InvalidModelFile("general.architecture is missing or no text", field="general.architecture")
    keys = _Keys(metadata, prefix=architecture, named=named)
    _refuse_unsupported(keys)
    hidden_size = keys.integer("embedding_length", MAX_WIDTH)
    num_q_heads = keys.integer("attention.head_count", MAX_WIDTH)
    num_kv_heads = keys.integer("attention.head_count_kv", MAX_WIDTH, default=num_q_heads)
    keys.require(
        "attention.head_count_kv",
        f"is {num_kv_heads}, which does not divide {num_q_heads} heads",
        holds=num_q_heads % num_kv_heads == 0,
    )
    num_layers = keys.integer("block_count", MAX_LAYERS)
    head_dim = _head_dim(keys, hidden_size // num_q_heads)
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length", MAX_WIDTH),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        context_tokens=keys.integer("context_length", MAX_CONTEXT_TOKENS),
        norm_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(keys),
        layer_windows=_layer_windows(keys, num_layers) if architecture in _WINDOWED else (0,) * num_layers,
        query_scale=_query_scale(keys, head_dim=head_dim, num_layers=num_layers),
    )


def _head_dim(keys: "_Keys", even_share: int) -> int:
    head_dim = keys.integer("attention.key_length", MAX_WIDTH, default=even_share)
    keys.require("attention.key_length", f"is {head_dim}, must be even", holds=head_dim % 2 == 0)
    for key in ("attention.value_length", "rope.dimension_count"):
        other = keys.integer(key, MAX_WIDTH, default=head_dim)
        keys.require(key, f"is {other}, only the key length {head_dim} is supported", holds=other == head_dim)
    return head_dim


def _rope(keys: "_Keys") -> RopeConfig:
    base = keys.number("rope.freq_base", default=10_000.0)
    is_windowed = keys.architecture in _WINDOWED
    return RopeConfig(
        base=base,
        window_base=keys.number("rope.freq_base_swa", default=_WINDOW_ROPE_BASE) if is_windowed else base,
        is_interleaved=keys.architecture in _INTERLEAVED,
        stretch=keys.number("rope.scaling.factor") if keys.get("rope.scaling.type") == "linear" else 1.0,
    )


def _layer_windows(keys: "_Keys", num_layers: int) -> tuple[int, ...]:
    """Every n-th layer sees everything, the others a window."""
    window = keys.integer("attention.sliding_window", MAX_CONTEXT_TOKENS)
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray) and len(pattern) == num_layers:
        return tuple(window if is_windowed else 0 for is_windowed in pattern.tolist())
    every = keys.integer("attention.sliding_window_pattern", MAX_LAYERS, default=_FULL_EVERY)
    return tuple(0 if index % every == every - 1 else window for index in range(num_layers))


def _query_scale(keys: "_Keys", *, head_dim: int, num_layers: int) -> float:
    """Gemma's largest model, the one of 62 layers, divides by its hidden size per head; its files do not say so."""
    if keys.architecture == "gemma3" and num_layers == _GEMMA_27B_LAYERS:
        hidden_size = keys.integer("embedding_length", MAX_WIDTH)
        return float((hidden_size / keys.integer("attention.head_count", MAX_WIDTH)) ** -0.5)
    return float(head_dim**-0.5)


class _Keys:
    """Checked reads below one architecture's prefix."""

    def __init__(self, metadata: Mapping[str, Value], *, prefix: str, named: Callable[[str], str]) -> None:
        self._metadata = metadata
        self._named = named
        self.architecture = prefix

    def name(self, key: str) -> str:
        return self._named(f"{self.architecture}.{key}")

    def get(self, key: str) -> Value | None:
        return self._metadata.get(f"{self.architecture}.{key}")

    def require(self, key: str, problem: str, *, holds: bool) -> None:
        if not holds:
            raise self.error(key, problem)

    def error(self, key: str, problem: str) -> InvalidModelFile:
        return InvalidModelFile(f"{self.name(key)} {problem}", field=self.name(key))

    def integer(self, key: str, limit: int, *, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"{said(value)}, must be an integer from 1 to {limit}")
        self.require(key, f"is {value}, must be 1 to {limit}", holds=1 <= value <= limit)
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, float) or not 0 < value < MAX_NUMBER:
            raise self.error(key, f"{said(value)}, must be a number above 0 and below {MAX_NUMBER:g}")
        return value


_UNREAD: Mapping[str, str] = MappingProxyType(
    {
        "expert_count": "mixtures of experts",
        "attn_logit_softcapping": "soft caps of scores",
        "final_logit_softcapping": "soft caps of logits",
        "attention.sliding_window": "a sliding window in this family's GGUF files",
        "rope.scaling.factor": "a scaling factor without a scaling type",
    }
)
"""Keys of what no layer computes, and what that is."""


def _refuse_unsupported(keys: _Keys) -> None:
    scaling = keys.get("rope.scaling.type")
    if scaling is not None and scaling not in _SCALINGS:
        name = keys.name("rope.scaling.type")
        raise UnsupportedFeature(f"{name} is {shown(scaling)}, supported: {', '.join(_SCALINGS)}", field=name)
    used = {"attention.sliding_window"} if keys.architecture in _WINDOWED else set()
    used |= {"rope.scaling.factor"} if scaling == "linear" else set()
    for key, what in _UNREAD.items():
        value = keys.get(key)
        if key not in used and value not in (None, 0, 0.0, 1.0):
            message = f"{keys.name(key)} is {shown(value)}, and no layer here computes {what}"
            raise UnsupportedFeature(message, field=keys.name(key))
