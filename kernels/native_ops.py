"""Single operators of the native library: what models other than NativeModel, the sampler and tests call.

Each has a slow reference of the same meaning under `kernels/reference`, and a test that runs both.
"""

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kernels.errors import KernelError, KernelStatus
from kernels.native import Native, ThreadPool
from kernels.native_model import StepPages, check_length, check_page_lengths, page_columns
from kernels.native_types import PAGE_SIZE, CAttention, Variant, address, contiguous

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedRowTable:
    """Rows of a step and the pages that they read."""

    qo_indptr: Array
    """[num_rows + 1] int32"""
    seq_lens: Array
    """[num_rows] int32: the tokens of this step included; their keys and values are already in the pages."""
    pages: StepPages


def paged_attention(
    pool: ThreadPool, queries: Array, kv: Array, *, table: PagedRowTable, scale: float, window: int = 0
) -> Array:
    """Causal attention of each row's last tokens over its pages.

    Args:
        pool: threads to use.
        queries: [num_tokens, num_q_heads, head_dim] float32, rotated.
        kv: [num_pages, num_kv_heads, 2, 16 * head_dim] float16 or float32, contiguous: a page's keys as
            [head_dim, 16], its values as [16, head_dim].
        table: rows and pages; `out_cache_loc` is not read.
        scale: multiplies the scores.
        window: positions that a token attends to, its own included; 0: all before it.

    Returns:
        [num_tokens, num_q_heads, head_dim] float32, owned.

    Raises:
        KernelError: shapes or indices do not fit.
    """
    num_tokens, num_q_heads, head_dim = queries.shape
    if kv.ndim != 4 or kv.shape[2:] != (2, PAGE_SIZE * head_dim):
        message = f"kv has shape {kv.shape}, must be (pages, kv heads, 2, {PAGE_SIZE * head_dim})"
        raise KernelError(message, status=KernelStatus.INVALID)
    if kv.dtype not in (np.float16, np.float32) or not kv.flags.c_contiguous:
        message = f"kv is {kv.dtype}, must be contiguous float16 or float32"
        raise KernelError(message, status=KernelStatus.INVALID)
    num_rows = len(table.seq_lens)
    check_length("qo_indptr", table.qo_indptr, num_rows + 1)
    check_page_lengths(table.pages, num_rows=num_rows)
    out = np.empty((num_tokens, num_q_heads, head_dim), np.float32)
    q, indptr = contiguous(queries, np.float32), contiguous(table.qo_indptr, np.int32)
    seq_lens = contiguous(table.seq_lens, np.int32)
    columns = page_columns(table.pages)
    arguments = CAttention(
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_q_heads=num_q_heads,
        num_kv_heads=kv.shape[1],
        head_dim=head_dim,
        num_pages=kv.shape[0],
        window=window,
        pages_are_f32=int(kv.dtype == np.float32),
        scale=scale,
        q=address(q),
        kv=address(kv),
        qo_indptr=address(indptr),
        seq_lens=address(seq_lens),
        out=address(out),
    )
    for name, array in columns.items():
        setattr(arguments.pages, name, address(array))
    pool.native.call("fp_paged_attention", pool.handle, ctypes.byref(arguments))
    return out


def linear(
    pool: ThreadPool,
    inputs: Array,
    weights: Array,
    *,
    tensor_type: int,
    num_outputs: int,
    variant: Variant = Variant.AUTO,
) -> Array:
    """`inputs` times the transpose of a quantised matrix, as the layers of a model do it.

    Args:
        pool: threads to use.
        inputs: [m, k] float32.
        weights: uint8, the matrix [num_outputs, k] as a GGUF file holds it.
        tensor_type: GGUF's number of its type.
        num_outputs: rows of the matrix.
        variant: which products.

    Returns:
        [m, num_outputs] float32, owned.

    Raises:
        KernelError: the type has no kernel, or sizes do not fit.
    """
    x, raw = contiguous(inputs, np.float32), contiguous(weights, np.uint8)
    out = np.empty((x.shape[0], num_outputs), np.float32)
    shape = (num_outputs, x.shape[1])
    weight = (pool.handle, variant, tensor_type, address(raw), raw.nbytes)
    pool.native.call("fp_linear", *weight, *shape, address(x), x.shape[0], address(out))
    return out


class TopK(NamedTuple):
    """The best of a row of logits."""

    ids: Array
    """[k] int32, by logit descending, then id ascending."""
    values: Array
    """[k] float32"""


def top_k_logits(native: Native, row: Array, k: int) -> TopK:
    """The `k` largest logits of `row` [n] float32 without sorting it. NaN counts as smaller than every number.

    Raises:
        KernelError: k is not 1 to n.
    """
    logits = contiguous(row, np.float32)
    count = min(max(k, 0), logits.size)
    ids, values = np.empty(count, np.int32), np.empty(count, np.float32)
    native.call("fp_top_k", address(logits), logits.size, k, address(ids), address(values))
    return TopK(ids, values)
