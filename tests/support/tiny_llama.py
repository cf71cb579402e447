"""Random small models of the Llama family as real model folders: a GGUF file and everything derived from it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protos.client.fetch_model import prepare_folder
from protos.service.model_files import ModelFolder
from tests.support import gguf_bytes as g


@dataclass(frozen=True, kw_only=True)
class Shape:
    architecture: str = "llama"
    num_layers: int = 2
    hidden_size: int = 48
    intermediate_size: int = 80
    num_q_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 300
    context_tokens: int = 512
    is_tied: bool = True
    window: int = 0
    """Of Gemma 3's windowed layers."""
    biased_parts: tuple[str, ...] = ()
    """Products that add a bias, beside those of the architecture."""
    full_every: int | None = None
    """Said in the file, if not None."""


def _tokens(vocab_size: int) -> list[str]:
    """The byte alphabet of byte-level BPE first, then numbered tokens; the last two are control tokens."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    alphabet = [chr(byte) for byte in visible] + [chr(256 + index) for index in range(len(others))]
    return [*alphabet, *(f"<t{index}>" for index in range(vocab_size - 256))]


def metadata(shape: Shape) -> list[bytes]:
    name = shape.architecture
    count = shape.vocab_size
    windows = [g.entry(f"{name}.attention.sliding_window", g.U32, shape.window)] if shape.window else []
    if shape.full_every is not None:
        windows.append(g.entry(f"{name}.attention.sliding_window_pattern", g.U32, shape.full_every))
    return [
        *windows,
        g.entry("general.architecture", g.STRING, name),
        g.entry(f"{name}.block_count", g.U32, shape.num_layers),
        g.entry(f"{name}.context_length", g.U32, shape.context_tokens),
        g.entry(f"{name}.embedding_length", g.U32, shape.hidden_size),
        g.entry(f"{name}.feed_forward_length", g.U32, shape.intermediate_size),
        g.entry(f"{name}.attention.head_count", g.U32, shape.num_q_heads),
        g.entry(f"{name}.attention.head_count_kv", g.U32, shape.num_kv_heads),
        g.entry(f"{name}.attention.key_length", g.U32, shape.head_dim),
        g.entry(f"{name}.attention.value_length", g.U32, shape.head_dim),
        g.entry(f"{name}.attention.layer_norm_rms_epsilon", g.F32, 1e-5),
        g.entry(f"{name}.rope.freq_base", g.F32, 10_000.0),
        g.entry("tokenizer.ggml.model", g.STRING, "gpt2"),
        g.entry("tokenizer.ggml.pre", g.STRING, "smollm"),
        g.array_entry("tokenizer.ggml.tokens", g.STRING, _tokens(count)),
        g.array_entry("tokenizer.ggml.token_type", 5, [1] * (count - 2) + [3, 3]),
        g.array_entry("tokenizer.ggml.merges", g.STRING, []),
        g.entry("tokenizer.ggml.bos_token_id", g.U32, count - 2),
        g.entry("tokenizer.ggml.eos_token_id", g.U32, count - 1),
    ]


def parameters(shape: Shape, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights by GGUF name, as they stand in the file."""
    rng = np.random.default_rng(seed)
    q_width, kv_width = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes = {
        "attn_q.weight": (q_width, shape.hidden_size),
        "attn_k.weight": (kv_width, shape.hidden_size),
        "attn_v.weight": (kv_width, shape.hidden_size),
        "attn_output.weight": (shape.hidden_size, q_width),
        "ffn_gate.weight": (shape.intermediate_size, shape.hidden_size),
        "ffn_up.weight": (shape.intermediate_size, shape.hidden_size),
        "ffn_down.weight": (shape.hidden_size, shape.intermediate_size),
        "attn_norm.weight": (shape.hidden_size,),
        "ffn_norm.weight": (shape.hidden_size,),
    }
    if shape.architecture == "qwen2":
        shapes |= {"attn_q.bias": (q_width,), "attn_k.bias": (kv_width,), "attn_v.bias": (kv_width,)}
    shapes |= {f"{part}.bias": shapes[f"{part}.weight"][:1] for part in shape.biased_parts}
    if shape.architecture in ("qwen3", "gemma3"):
        shapes |= {"attn_q_norm.weight": (shape.head_dim,), "attn_k_norm.weight": (shape.head_dim,)}
    if shape.architecture == "gemma3":
        shapes |= {"post_attention_norm.weight": (shape.hidden_size,), "post_ffw_norm.weight": (shape.hidden_size,)}
    found = {
        f"blk.{layer}.{name}": rng.normal(size=size) * (0.2 if len(size) > 1 else 0.5) + ("norm" in name)
        for layer in range(shape.num_layers)
        for name, size in shapes.items()
    }
    found["token_embd.weight"] = rng.normal(size=(shape.vocab_size, shape.hidden_size))
    found["output_norm.weight"] = rng.normal(size=shape.hidden_size) * 0.3 + 1
    if not shape.is_tied:
        found["output.weight"] = rng.normal(size=(shape.vocab_size, shape.hidden_size))
    return {name: values.astype(np.float32) for name, values in found.items()}


def gguf_content(shape: Shape, weights: dict[str, np.ndarray], *, is_quantised: bool = False) -> bytes:
    def matrix(name: str, values: np.ndarray) -> g.Tensor:
        return g.q8_0_tensor(name, values) if is_quantised and values.ndim > 1 else g.f32_tensor(name, values)

    return g.gguf(metadata=metadata(shape), tensors=[matrix(name, values) for name, values in weights.items()])


def tiny_folder(path: Path, shape: Shape | None = None, *, seed: int = 0, is_quantised: bool = False) -> ModelFolder:
    """A model folder below `path`; `is_quantised`: its matrices are Q8_0."""
    shape = Shape() if shape is None else shape
    content = gguf_content(shape, parameters(shape, seed=seed), is_quantised=is_quantised)
    file = g.write(path / "tiny.gguf", content)
    return prepare_folder(file, cache=path / "cache")
