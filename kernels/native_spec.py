"""What a model is to the native kernels: its shape, its limits, and which tensor of a GGUF file plays which role.

Pure. Knows no files: metadata and tensors are handed in by whoever read them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kernels.errors import KernelError, KernelStatus
from kernels.native_types import Activation, Role, Variant

INTERLEAVED = frozenset({"llama"})
"""Architectures whose GGUF stores q and k for rotation of neighbouring pairs."""
ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3", "gemma3"})
GEMMA_LOCAL_ROPE_THETA = 10_000.0
GEMMA_FULL_EVERY = 6

_GLOBAL_ROLES = {
    "token_embd.weight": Role.TOKEN_EMBEDDING,
    "output.weight": Role.OUTPUT,
    "output_norm.weight": Role.OUTPUT_NORM,
    "rope_freqs.weight": Role.ROPE_FACTORS,
}
_LAYER_ROLES = {
    "attn_norm.weight": Role.ATTN_NORM,
    "attn_q.weight": Role.Q,
    "attn_k.weight": Role.K,
    "attn_v.weight": Role.V,
    "attn_output.weight": Role.ATTN_OUT,
    "attn_q.bias": Role.Q_BIAS,
    "attn_k.bias": Role.K_BIAS,
    "attn_v.bias": Role.V_BIAS,
    "ffn_norm.weight": Role.FFN_NORM,
    "ffn_gate.weight": Role.GATE,
    "ffn_up.weight": Role.UP,
    "ffn_down.weight": Role.DOWN,
    "attn_q_norm.weight": Role.Q_NORM,
    "attn_k_norm.weight": Role.K_NORM,
    "post_attention_norm.weight": Role.POST_ATTN_NORM,
    "post_ffw_norm.weight": Role.POST_FFN_NORM,
}


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs from layer to layer."""

    group: int = 0
    """Sub-pool whose pages it uses."""
    window: int = 0
    """Sliding window in tokens, the row's own included; 0: none."""
    rope: int = 0
    """Which of the model's rope bases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeModelSpec:
    """A Llama-like decoder."""

    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    rms_epsilon: float
    rope_thetas: tuple[float, ...]
    rope_interleaved: bool
    layers: tuple[LayerSpec, ...]
    activation: Activation = Activation.SILU
    embedding_scale: float = 1.0
    attention_scale: float
    """Multiplies q."""

    @property
    def num_groups(self) -> int:
        """Sub-pools."""
        return 1 + max(layer.group for layer in self.layers)

    def layers_of(self, group: int) -> int:
        """Layers whose pages are in sub-pool `group`."""
        return sum(layer.group == group for layer in self.layers)

    def bytes_per_page(self, group: int, page_size: int) -> int:
        """Keys and values of all layers of the sub-pool, fp16."""
        return self.layers_of(group) * 2 * self.num_kv_heads * self.head_dim * page_size * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLimits:
    """What buffers are made for."""

    num_pages: tuple[int, ...]
    """Pages of each sub-pool, the sink included."""
    max_context: int
    max_tokens: int
    """Tokens of one step."""
    max_rows: int
    variant: Variant = Variant.AUTO


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawTensor:
    """A tensor as a GGUF file holds it."""

    type: int
    """GGUF's number of the type."""
    data: np.ndarray
    """uint8, contiguous; read while the model is made, not kept."""


def role_of(name: str) -> tuple[Role, int] | None:
    """The role and layer (-1: none) of the tensor called `name`, or None if the kernels have no use for it."""
    if name in _GLOBAL_ROLES:
        return _GLOBAL_ROLES[name], -1
    prefix, _, rest = name.partition(".")
    number, _, part = rest.partition(".")
    if prefix == "blk" and number.isdigit() and part in _LAYER_ROLES:
        return _LAYER_ROLES[part], int(number)
    return None


def placed(weights: Mapping[str, RawTensor]) -> Iterator[tuple[Role, int, RawTensor]]:
    """Every tensor with its role and layer.

    Raises:
        KernelError: a tensor has no role: the model has parts that the kernels do not compute.
    """
    for name, tensor in weights.items():
        place = role_of(name)
        if place is None:
            raise KernelError(f"tensor {name!r} has no native kernel", status=KernelStatus.UNSUPPORTED)
        yield (*place, tensor)


def spec_from_metadata(metadata: Mapping[str, object], *, vocab_size: int) -> NativeModelSpec:
    """The spec of a GGUF file's metadata; `vocab_size` is the number of rows of its embedding.

    Raises:
        KernelError: another architecture, a missing key, or a feature that the kernels lack.
    """
    fields = _Fields(metadata)
    name = fields.architecture
    heads, hidden = fields.whole("attention.head_count"), fields.whole("embedding_length")
    head_dim = fields.whole("attention.key_length", hidden // heads)
    is_gemma = name == "gemma3"
    theta = fields.real("rope.freq_base", 10_000.0)
    return NativeModelSpec(
        hidden_size=hidden,
        num_q_heads=heads,
        num_kv_heads=fields.whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn_size=fields.whole("feed_forward_length"),
        vocab_size=vocab_size,
        rms_epsilon=fields.real("attention.layer_norm_rms_epsilon"),
        rope_thetas=(theta, GEMMA_LOCAL_ROPE_THETA) if is_gemma else (theta,),
        rope_interleaved=name in INTERLEAVED,
        layers=_layers(fields, is_gemma=is_gemma),
        activation=Activation.GELU_TANH if is_gemma else Activation.SILU,
        embedding_scale=math.sqrt(hidden) if is_gemma else 1.0,
        attention_scale=head_dim**-0.5,
    )


def _layers(fields: "_Fields", *, is_gemma: bool) -> tuple[LayerSpec, ...]:
    count = fields.whole("block_count")
    if not is_gemma:
        return (LayerSpec(),) * count
    window = fields.whole("attention.sliding_window")
    # Where no layer sees everything there is one sub-pool, which keeps everything: lengths are counted by it.
    local = LayerSpec(group=int(count >= GEMMA_FULL_EVERY), window=window, rope=1)
    return tuple(LayerSpec() if index % GEMMA_FULL_EVERY == GEMMA_FULL_EVERY - 1 else local for index in range(count))


class _Fields:
    """Typed reads of one architecture's metadata."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.architecture = str(metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise KernelError(
                f"architecture {self.architecture!r} has no native kernels", status=KernelStatus.UNSUPPORTED
            )

    def _value(self, key: str, default: float | None) -> float:
        value = self._metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            message = f"metadata {self.architecture}.{key} is {value!r}, must be a number"
            raise KernelError(message, status=KernelStatus.INVALID)
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        return int(self._value(key, default))

    def real(self, key: str, default: float | None = None) -> float:
        return float(self._value(key, default))
