"""Which tensors a model of an architecture consists of, by the names of GGUF, and whether files hold them.

Opens no tensor. Guards: every parameter of a table is there once, with exactly the table's shape and a type that can be
read, and nothing is there that the architecture has no use for: it would change the result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from protos.service.gguf_header import shown
from protos.service.model_config import ModelConfig
from protos.service.safetensors_folder import StoredTensor
from protos.wire.errors import InvalidModelFile

Shapes = dict[str, tuple[int, ...]]
EMBEDDING, OUTPUT, OUTPUT_NORM, ROPE_FACTORS = (
    "token_embd.weight",
    "output.weight",
    "output_norm.weight",
    "rope_freqs.weight",
)
WEIGHT_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""Types of stored tensors that workers can read."""
_WITHOUT_FACTORS = frozenset({"gemma3"})
"""Architectures whose turns have no factors of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter an architecture needs."""

    name: str
    shape: tuple[int, ...]
    is_optional: bool = False


def layer_prefix(index: int) -> str:
    """Of the names of a layer's tensors."""
    return f"blk.{index}."


def parameter_table(config: ModelConfig) -> list[ParameterSpec]:
    """Every tensor that the config's architecture reads. Without a head of its own, the embedding is the head."""
    layer = _layer_shapes(config) | _bias_shapes(config) | FAMILY_SHAPES[config.architecture](config)
    table = [
        ParameterSpec(name=EMBEDDING, shape=(config.vocab_size, config.hidden_size)),
        ParameterSpec(name=OUTPUT_NORM, shape=(config.hidden_size,)),
        ParameterSpec(name=OUTPUT, shape=(config.vocab_size, config.hidden_size), is_optional=True),
    ]
    if config.architecture not in _WITHOUT_FACTORS:
        table.append(ParameterSpec(name=ROPE_FACTORS, shape=(config.head_dim // 2,), is_optional=True))
    for index in range(config.num_layers):
        table += [ParameterSpec(name=layer_prefix(index) + name, shape=shape) for name, shape in layer.items()]
    return table


def chosen_tensors(
    stored: Mapping[str, StoredTensor], table: Sequence[ParameterSpec], *, of: str
) -> dict[str, StoredTensor]:
    """The stored tensor of each parameter; `of` names the weights in messages.

    Raises:
        InvalidModelFile: a parameter is missing, has another shape or a type that cannot be read, or a tensor is left.
    """
    chosen = {spec.name: _chosen(stored, spec, of=of) for spec in table if spec.name in stored or not spec.is_optional}
    left = next((name for name in stored if name not in chosen), None)
    if left is not None:
        field = f"tensor {stored[left].entry.name!r}"
        message = f"{of}: tensor {shown(stored[left].entry.name)} has no use in this model, which would ignore it"
        raise InvalidModelFile(message, field=field)
    return chosen


def _chosen(stored: Mapping[str, StoredTensor], spec: ParameterSpec, *, of: str) -> StoredTensor:
    tensor = stored.get(spec.name)
    if tensor is None:
        field = f"tensor {spec.name!r}"
        raise InvalidModelFile(f"{of}: {field} is missing, the architecture needs it", field=field)
    info = tensor.entry
    field, file = f"tensor {info.name!r}", tensor.path.name
    if info.shape != spec.shape:
        message = f"{file}: {field} has shape {list(info.shape)}, the architecture needs {list(spec.shape)}"
        raise InvalidModelFile(message, field=field)
    if info.type.name not in WEIGHT_TYPES:
        message = f"{file}: {field} has type {info.type.name}, supported: {', '.join(WEIGHT_TYPES)}"
        raise InvalidModelFile(message, field=field)
    return tensor


def _layer_shapes(config: ModelConfig) -> Shapes:
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


def _bias_shapes(config: ModelConfig) -> Shapes:
    biases = config.biases
    parts = ["attn_q", "attn_k", "attn_v"] if biases.qkv else []
    parts += ["attn_output"] if biases.output else []
    parts += ["ffn_gate", "ffn_up", "ffn_down"] if biases.mlp else []
    weights = _layer_shapes(config)
    return {f"{part}.bias": weights[f"{part}.weight"][:1] for part in parts}


def _nothing_more(_config: ModelConfig) -> Shapes:
    return {}


def _head_norms(config: ModelConfig) -> Shapes:
    return {"attn_q_norm.weight": (config.head_dim,), "attn_k_norm.weight": (config.head_dim,)}


def _gemmas_norms(config: ModelConfig) -> Shapes:
    around: Shapes = {
        "post_attention_norm.weight": (config.hidden_size,),
        "post_ffw_norm.weight": (config.hidden_size,),
    }
    return _head_norms(config) | around


FAMILY_SHAPES: Mapping[str, Callable[[ModelConfig], Shapes]] = MappingProxyType(
    {"llama": _nothing_more, "qwen2": _nothing_more, "qwen3": _head_norms, "gemma3": _gemmas_norms}
)
"""By architecture, all there are: what its layers have beyond the common tensors."""
