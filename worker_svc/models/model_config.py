"""GGUF metadata -> frozen ModelConfig.

The one place that knows metadata keys of weights. Guards: every number is inside the bounds the layers rely on, and a
property that would change the result but has no code here is refused, never ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from protos.service.gguf_header import Value, shown
from protos.wire.errors import InvalidModelFile, UnsupportedFeature

MAX_LAYERS = 512
MAX_WIDTH = 1 << 17
MAX_VOCABULARY = 1 << 21
MAX_CONTEXT_TOKENS = 1 << 20
MAX_NUMBER = 1e12


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
    rope_base: float


def read_model_config(metadata: Mapping[str, Value], *, vocab_size: int) -> ModelConfig:
    """The config in a GGUF file's metadata. `vocab_size` is the embedding's height.

    Raises:
        InvalidModelFile: a key is missing or out of bounds; names key, value and limit.
        UnsupportedFeature: the weights need what no layer here computes.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise InvalidModelFile("general.architecture is missing or no text", field="general.architecture")
    keys = _Keys(metadata, prefix=architecture)
    _refuse_unsupported(keys)
    hidden_size = keys.integer("embedding_length", MAX_WIDTH)
    num_q_heads = keys.integer("attention.head_count", MAX_WIDTH)
    num_kv_heads = keys.integer("attention.head_count_kv", MAX_WIDTH, default=num_q_heads)
    keys.require(
        "attention.head_count_kv", f"does not divide {num_q_heads} heads", holds=num_q_heads % num_kv_heads == 0
    )
    head_dim = keys.integer("attention.key_length", MAX_WIDTH, default=hidden_size // num_q_heads)
    keys.require("attention.key_length", f"is {head_dim}, must be even", holds=head_dim % 2 == 0)
    for key in ("attention.value_length", "rope.dimension_count"):
        other = keys.integer(key, MAX_WIDTH, default=head_dim)
        keys.require(key, f"is {other}, only the key length {head_dim} is supported", holds=other == head_dim)
    return ModelConfig(
        architecture=architecture,
        num_layers=keys.integer("block_count", MAX_LAYERS),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length", MAX_WIDTH),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        context_tokens=keys.integer("context_length", MAX_CONTEXT_TOKENS),
        norm_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
        rope_base=keys.number("rope.freq_base", default=10_000.0),
    )


class _Keys:
    """Checked reads below one architecture's prefix."""

    def __init__(self, metadata: Mapping[str, Value], *, prefix: str) -> None:
        self._metadata = metadata
        self._prefix = prefix

    def get(self, key: str) -> Value | None:
        return self._metadata.get(f"{self._prefix}.{key}")

    def require(self, key: str, problem: str, *, holds: bool) -> None:
        if not holds:
            raise self.error(key, problem)

    def error(self, key: str, problem: str) -> InvalidModelFile:
        return InvalidModelFile(f"{self._prefix}.{key} {problem}", field=f"{self._prefix}.{key}")

    def integer(self, key: str, limit: int, *, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"is {shown(value)}, must be an integer")
        self.require(key, f"is {value}, must be 1 to {limit}", holds=1 <= value <= limit)
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, float) or not 0 < value < MAX_NUMBER:
            raise self.error(key, f"is {shown(value)}, must be a number above 0 and below {MAX_NUMBER}")
        return value


def _refuse_unsupported(keys: _Keys) -> None:
    scaling = keys.get("rope.scaling.type")
    if scaling not in (None, "none"):
        raise UnsupportedFeature(f"rope.scaling.type is {shown(scaling)}, supported: none", field="rope.scaling.type")
    for key in ("expert_count", "attention.sliding_window", "rope.scaling.factor"):
        value = keys.get(key)
        if value not in (None, 0, 0.0, 1.0):
            raise UnsupportedFeature(f"{key} is {shown(value)}, which no layer here computes", field=key)
