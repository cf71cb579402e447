"""The operators of `kernels/reference/index_ops.py` as Triton kernels.

Tensors lie on a CUDA device, or on any where Triton's interpreter runs the kernels (TRITON_INTERPRET=1, tests).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit
def _positions_kernel(lens, out, block: tl.constexpr):
    """One program fills a block of one row. `lens`: prefix, extend, index of the first token."""
    row = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    count = tl.load(lens[1] + row)
    first = tl.load(lens[0] + row).to(tl.int64)
    tl.store(out + tl.load(lens[2] + row) + at, first + at, mask=at < count)


@triton.jit
def _slots_kernel(tokens, table, sizes, block: tl.constexpr):
    """`tokens`: positions, rows, slots. `table`: indptr, indices, starts. `sizes`: number of tokens, page size."""
    token = tl.program_id(0) * block + tl.arange(0, block)
    inside = token < sizes[0]
    row = tl.load(tokens[1] + token, mask=inside, other=0)
    relative = tl.load(tokens[0] + token, mask=inside, other=0) - tl.load(table[2] + row, mask=inside, other=0)
    place = tl.load(table[0] + row, mask=inside, other=0) + relative // sizes[1]
    page = tl.load(table[1] + place, mask=inside, other=0).to(tl.int64)
    tl.store(tokens[2] + token, page * sizes[1] + relative % sizes[1], mask=inside)


@triton.jit
def _write_kernel(tensors, shape, strides, block: tl.constexpr):
    """One program copies a token. `tensors`: source, slots, target. `shape`: heads, dim, page size. `strides`: 7."""
    source, target = tensors[0], tensors[2]
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(tensors[1] + token)
    page, offset = slot // shape[2], slot % shape[2]
    index = tl.arange(0, block)
    head, dim = index // shape[1], index % shape[1]
    inside = index < shape[0] * shape[1]
    value = tl.load(source + token * strides[0] + head * strides[1] + dim * strides[2], mask=inside, other=0.0)
    to = target + head * strides[3] + page * strides[4] + offset * strides[5] + dim * strides[6]
    if page > 0:
        tl.store(to, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _tokens_kernel(tokens, out, count, block: tl.constexpr):
    """`tokens`: literals, references, sampled."""
    token = tl.program_id(0) * block + tl.arange(0, block)
    inside = token < count
    reference = tl.load(tokens[1] + token, mask=inside, other=-1)
    literal = tl.load(tokens[0] + token, mask=inside, other=0)
    known = tl.load(tokens[2] + reference, mask=inside & (reference >= 0), other=0)
    tl.store(out + token, tl.where(reference >= 0, known, literal), mask=inside)


def extend_positions(prefix_lens: Tensor, extend_lens: Tensor, *, num_tokens: int, longest: int) -> Tensor:
    """See the reference. The numbers are sum and maximum of `extend_lens`, from the host: nothing is waited for."""
    out = torch.empty(num_tokens, dtype=torch.int64, device=extend_lens.device)
    starts = extend_lens.cumsum(0) - extend_lens
    grid = (len(extend_lens), triton.cdiv(longest, BLOCK))
    if num_tokens:
        _positions_kernel[grid]((prefix_lens, extend_lens, starts), out, block=BLOCK)
    return out


def page_slots(positions: Tensor, rows: Tensor, *, table: tuple[Tensor, Tensor, Tensor], page_size: int) -> Tensor:
    """See the reference."""
    out = torch.empty_like(positions)
    if len(positions):
        grid = (triton.cdiv(len(positions), BLOCK),)
        _slots_kernel[grid]((positions, rows, out), table, (len(positions), page_size), block=BLOCK)
    return out


def write_kv(source: Tensor, slots: Tensor, target: Tensor) -> None:
    """See the reference."""
    heads, _, page_size, dim = target.shape
    if len(slots):
        strides = (*source.stride(), *target.stride())
        block = triton.next_power_of_2(heads * dim)
        _write_kernel[(len(slots),)]((source, slots, target), (heads, dim, page_size), strides, block=block)


def resolved_tokens(literals: Tensor, references: Tensor, sampled: Tensor) -> Tensor:
    """See the reference."""
    out = torch.empty_like(literals)
    if len(literals):
        grid = (triton.cdiv(len(literals), BLOCK),)
        _tokens_kernel[grid]((literals, references, sampled), out, len(literals), block=BLOCK)
    return out
