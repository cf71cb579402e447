"""The C structures of `csrc/fp_api.h`, field by field. Plain data; a test compares their sizes with the header's."""

import ctypes
from enum import IntEnum

import numpy as np

PAGE_SIZE = 16
MAX_GROUPS = 2
MAX_ROPES = 2
ERROR_BYTES = 256
NUM_TIMES = 7


class Variant(IntEnum):
    """Which products run."""

    AUTO = 0
    AVX2 = 1
    AVX512_VNNI = 2
    CHECK = 3
    """Float activations on dequantised weights: slow; proves everything but the rounding of activations."""


class Activation(IntEnum):
    """Of the feed-forward block."""

    SILU = 0
    GELU_TANH = 1


class Role(IntEnum):
    """What a tensor is for."""

    TOKEN_EMBEDDING = 0
    OUTPUT = 1
    OUTPUT_NORM = 2
    ROPE_FACTORS = 3
    ATTN_NORM = 4
    Q = 5
    K = 6
    V = 7
    ATTN_OUT = 8
    Q_BIAS = 9
    K_BIAS = 10
    V_BIAS = 11
    FFN_NORM = 12
    GATE = 13
    UP = 14
    DOWN = 15
    Q_NORM = 16
    K_NORM = 17
    POST_ATTN_NORM = 18
    POST_FFN_NORM = 19


class CError(ctypes.Structure):
    """fp_error."""

    _fields_ = (("text", ctypes.c_char * ERROR_BYTES),)


class CLayerSpec(ctypes.Structure):
    """fp_layer_spec."""

    _fields_ = (("group", ctypes.c_int32), ("window", ctypes.c_int32), ("rope", ctypes.c_int32))


class CModelSpec(ctypes.Structure):
    """fp_model_spec."""

    _fields_ = (
        ("num_layers", ctypes.c_int32),
        ("hidden_size", ctypes.c_int32),
        ("num_q_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("ffn_size", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("max_context", ctypes.c_int32),
        ("max_tokens", ctypes.c_int32),
        ("max_rows", ctypes.c_int32),
        ("rope_interleaved", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("variant", ctypes.c_int32),
        ("num_groups", ctypes.c_int32),
        ("num_pages", ctypes.c_int32 * MAX_GROUPS),
        ("rope_theta", ctypes.c_float * MAX_ROPES),
        ("rms_epsilon", ctypes.c_float),
        ("embedding_scale", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
        ("layers", ctypes.POINTER(CLayerSpec)),
    )


class CPages(ctypes.Structure):
    """fp_pages."""

    _fields_ = (
        ("kv_indptr", ctypes.c_void_p),
        ("kv_indices", ctypes.c_void_p),
        ("start_positions", ctypes.c_void_p),
        ("out_cache_loc", ctypes.c_void_p),
    )


class CStep(ctypes.Structure):
    """fp_step."""

    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("num_out", ctypes.c_int32),
        ("input_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("qo_indptr", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("pages", CPages * MAX_GROUPS),
        ("out_tokens", ctypes.c_void_p),
        ("logits_slot", ctypes.c_void_p),
        ("num_logits", ctypes.c_int32),
        ("best_ids", ctypes.c_void_p),
        ("best_logits", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("last_hidden", ctypes.c_void_p),
        ("all_hidden", ctypes.c_void_p),
        ("finite", ctypes.c_void_p),
    )


class CAttention(ctypes.Structure):
    """fp_attention."""

    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("num_q_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("num_pages", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("pages_are_f32", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("q", ctypes.c_void_p),
        ("kv", ctypes.c_void_p),
        ("qo_indptr", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("pages", CPages),
        ("out", ctypes.c_void_p),
    )


def address(array: np.ndarray | None) -> int | None:
    """Of the first element, or null. The array must outlive its use."""
    return None if array is None else array.ctypes.data


def contiguous(array: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """The array itself if it is already as the library wants it, or a copy."""
    return np.ascontiguousarray(array, dtype=dtype)
