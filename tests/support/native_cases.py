"""Random quantised matrices, page tables and small models for the native kernels."""

import numpy as np

from kernels.native_model import NativeModel, StepInput, StepPages
from kernels.native_spec import LayerSpec, NativeLimits, NativeModelSpec, RawTensor
from kernels.native_types import PAGE_SIZE, Role
from kernels.reference.quantised import dequantise

F32, Q4_0, Q4_1, Q5_0, Q8_0, Q4_K, Q6_K = 0, 2, 3, 6, 8, 12, 14
BLOCKS = {Q4_0: (32, 18), Q4_1: (32, 20), Q5_0: (32, 22), Q8_0: (32, 34), Q4_K: (256, 144), Q6_K: (256, 210)}
_HALF_PLACES = {Q4_0: (0,), Q4_1: (0, 2), Q5_0: (0,), Q8_0: (0,), Q4_K: (0, 2), Q6_K: (208,)}
_SIZES = {Q4_0: 0.02, Q4_1: 0.02, Q5_0: 0.01, Q8_0: 0.002, Q4_K: 0.0005, Q6_K: 0.0001}
"""Scales that make the weights of every type about as large."""


def raw_matrix(rng, tensor_type, num_rows, num_columns):
    """Random bytes of a matrix of that type, with scales of a sensible size."""
    elements, size = BLOCKS[tensor_type]
    blocks = rng.integers(0, 256, (num_rows * num_columns // elements, size), dtype=np.uint8)
    for at in _HALF_PLACES[tensor_type]:
        scales = rng.uniform(0.5, 1.5, len(blocks)) * _SIZES[tensor_type]
        if tensor_type == Q4_1 and at == 2:
            scales = -8 * scales
        blocks[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(-1)


class Sequence:
    """Ids of one sequence and the pages that it owns, for every sub-pool the same."""

    def __init__(self, pages):
        self.pages = np.asarray(pages, np.int32)
        self.length = 0


def sequences(count, num_pages_each):
    """Sequences whose pages are scattered over the pool; page 0 is left out."""
    order = np.random.default_rng(5).permutation(count * num_pages_each) + 1
    return [Sequence(order[i * num_pages_each : (i + 1) * num_pages_each]) for i in range(count)]


def step_input(rows, *, num_groups=1, out_tokens=None, starts=None):
    """One step of [(sequence, ids)]; the sequences grow. `starts`: first listed position of each row, in group 1."""
    lens = [len(ids) for _, ids in rows]
    places = [np.arange(seq.length, seq.length + size) for (seq, _), size in zip(rows, lens, strict=True)]
    slots = [
        seq.pages[at // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + at % PAGE_SIZE
        for (seq, _), at in zip(rows, places, strict=True)
    ]
    for (seq, _), size in zip(rows, lens, strict=True):
        seq.length += size
    ends = np.cumsum(lens)
    groups = [_pages(rows, slots, starts if group == 1 else None) for group in range(num_groups)]
    return StepInput(
        input_ids=np.concatenate([np.asarray(ids, np.int32) for _, ids in rows]),
        positions=np.concatenate(places),
        qo_indptr=np.concatenate([[0], ends]).astype(np.int32),
        seq_lens=np.array([seq.length for seq, _ in rows], np.int32),
        pages=groups,
        out_tokens=(ends - 1 if out_tokens is None else np.asarray(out_tokens)).astype(np.int32),
        wants_logits=np.ones(len(rows) if out_tokens is None else len(out_tokens), np.bool_),
        wants_hidden=True,
    )


def _pages(rows, slots, starts):
    firsts = [0] * len(rows) if starts is None else [start // PAGE_SIZE for start in starts]
    own = [seq.pages[first : -(-seq.length // PAGE_SIZE)] for (seq, _), first in zip(rows, firsts, strict=True)]
    return StepPages(
        kv_indptr=np.concatenate([[0], np.cumsum([len(pages) for pages in own])]).astype(np.int32),
        kv_indices=np.concatenate(own),
        out_cache_loc=np.concatenate(slots),
        start_positions=None if starts is None else np.asarray(starts, np.int32),
    )


def small_spec(**changes):
    """Two layers of a shape in which nothing is equal to anything else."""
    values = {
        "hidden_size": 96,
        "num_q_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 64,
        "ffn_size": 160,
        "vocab_size": 203,
        "rms_epsilon": 1e-5,
        "rope_thetas": (10_000.0,),
        "rope_interleaved": True,
        "layers": (LayerSpec(), LayerSpec()),
        "attention_scale": 0.125,
    }
    return NativeModelSpec(**{**values, **changes})


def small_weights(spec, *, extras=(), matrix_type=Q4_1, seed=3):
    """Random weights by GGUF name. `extras`: names within a layer of optional vectors to include."""
    rng = np.random.default_rng(seed)
    wide, narrow = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, ffn = spec.hidden_size, spec.ffn_size
    matrices = {
        "attn_q": (wide, hidden),
        "attn_k": (narrow, hidden),
        "attn_v": (narrow, hidden),
        "attn_output": (hidden, wide),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    vectors = {"attn_norm.weight": hidden, "ffn_norm.weight": hidden}
    sizes = {"attn_q.bias": wide, "attn_k.bias": narrow, "attn_v.bias": narrow, "attn_q_norm.weight": spec.head_dim}
    sizes |= {"attn_k_norm.weight": spec.head_dim, "post_attention_norm.weight": hidden, "post_ffw_norm.weight": hidden}
    vectors |= {name: sizes[name] for name in extras}
    weights = {
        "token_embd.weight": _matrix(rng, Q8_0, spec.vocab_size, hidden),
        "output_norm.weight": _vector(rng, hidden),
    }
    for layer in range(len(spec.layers)):
        for name, shape in matrices.items():
            weights[f"blk.{layer}.{name}.weight"] = _matrix(rng, matrix_type, *shape)
        for name, size in vectors.items():
            weights[f"blk.{layer}.{name}"] = _vector(rng, size)
    return weights


def _matrix(rng, tensor_type, rows, columns):
    return RawTensor(type=tensor_type, data=raw_matrix(rng, tensor_type, rows, columns))


def _vector(rng, size):
    return RawTensor(type=F32, data=rng.uniform(0.5, 1.5, size).astype(np.float32).view(np.uint8))


def by_role(spec, weights, place):
    """The weights as floats, for `kernels.reference.decoder`; `place` maps a name to (role, layer)."""
    floats = {}
    for name, tensor in weights.items():
        role, layer = place(name)
        if tensor.type == F32:
            floats[role, layer] = tensor.data.view(np.float32)
        else:
            columns = {Role.ATTN_OUT: spec.num_q_heads * spec.head_dim, Role.DOWN: spec.ffn_size}.get(
                role, spec.hidden_size
            )
            elements, size = BLOCKS[tensor.type]
            shape = (tensor.data.size // size * elements // columns, columns)
            floats[role, layer] = dequantise(tensor.data, tensor.type, shape)
    return floats


def small_model(pool, spec, weights, **limits):
    values = {"num_pages": (200,) * spec.num_groups, "max_context": 512, "max_tokens": 512, "max_rows": 64}
    return NativeModel(spec, weights, limits=NativeLimits(**{**values, **limits}), pool=pool)
