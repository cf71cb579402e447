"""The columns of every column group of the schema: name, element type, and what an empty one means. One table.

Packs the arrays of a frozen group into a message of the same field names, and reads them back as read-only views.
Knows nothing of protobuf beyond attributes. Guards: no column can be forgotten (`tests/contract` walks the schema).
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from protos.wire.errors import EngineError

U8 = np.dtype("u1")
U32 = np.dtype("<u4")
U64 = np.dtype("<u8")
I32 = np.dtype("<i4")
F32 = np.dtype("<f4")

EMPTY = {dtype: np.frombuffer(b"", dtype) for dtype in (U8, U32, U64, I32, F32)}


@dataclass(frozen=True, slots=True)
class Column:
    """One `bytes` field of a message and the attribute of the same name of its frozen form."""

    name: str
    dtype: np.dtype[Any]
    optional: bool = True
    """Empty bytes are `None`; otherwise an empty array."""
    beside: str = ""
    """CSR content: when this other column is present, empty bytes are an empty array, not `None`."""


def _required(dtype: np.dtype[Any], *names: str) -> tuple[Column, ...]:
    return tuple(Column(name, dtype, optional=False) for name in names)


def _optional(dtype: np.dtype[Any], *names: str, beside: str = "") -> tuple[Column, ...]:
    return tuple(Column(name, dtype, beside=beside) for name in names)


ROWS = (
    *_required(U64, "handles"),
    *_required(U32, "attempts"),
    *_required(I32, "seq_lens", "extend_lens", "first_positions"),
    *_required(U8, "samples"),
    *_optional(U32, "sample_indices", "dp_ranks"),
    *_optional(U8, "hidden_modes"),
    *_optional(U64, "canary_seeds", "canary_hashes", "length_source_seqs"),
    *_optional(U32, "length_source_rows"),
)
TOKENS = (
    *_required(I32, "ids"),
    *_optional(U8, "sources"),
    *_optional(U64, "ref_seqs"),
    *_optional(U32, "ref_rows", "ref_offsets"),
)
PAGE_TABLE = (
    *_required(I32, "indptr", "indices", "last_page_lens", "written_pages"),
    *_optional(I32, "start_positions"),
)
PAGE_OPERATIONS = (
    *_required(U8, "kinds", "orders"),
    *_required(U32, "sub_pools"),
    *_required(I32, "sources", "targets"),
)
SAMPLING = (
    *_optional(F32, "temperatures", "top_ps", "min_ps"),
    *_optional(U32, "top_ks", "bias_indptr"),
    *_optional(U64, "seeds"),
    *_optional(U32, "bias_ids", beside="bias_indptr"),
    *_optional(F32, "bias_values", beside="bias_indptr"),
)
PENALTIES = (
    *_required(F32, "repetition", "frequency", "presence"),
    *_required(U32, "prompt_indptr", "prompt_ids", "output_indptr", "output_ids", "output_counts"),
)
MASKS = _required(U32, "row_masks")
MASK = (*_optional(U8, "allowed_bits"), *_optional(U32, "allowed_ids", "denied_ids"))
LOGPROBS = (
    *_optional(U8, "output_wanted", "output_top_counts", "prompt_top_counts"),
    *_optional(I32, "prompt_starts"),
    *_optional(U32, "target_indptr"),
    *_optional(I32, "target_ids", beside="target_indptr"),
)
DELTA = (*_required(U32, "base_rows"), *_required(U8, "present"))
WRITE_WINDOW = _optional(U32, "flat_index")

RESULT_ROWS = (
    *_required(U64, "handles"),
    *_required(U32, "attempts"),
    *_required(I32, "positions"),
    *_required(U8, "statuses"),
    *_required(I32, "token_ids"),
    *_optional(U8, "failures", "finite"),
    *_optional(U32, "token_counts"),
)
RESULT_LOGPROBS = (
    *_optional(F32, "output"),
    *_optional(U32, "output_top_indptr", "prompt_indptr", "prompt_top_indptr"),
    *_optional(I32, "output_top_ids", beside="output_top_indptr"),
    *_optional(F32, "output_top_values", beside="output_top_indptr"),
    *_optional(F32, "prompt", beside="prompt_indptr"),
    *_optional(I32, "prompt_top_ids", beside="prompt_top_indptr"),
    *_optional(F32, "prompt_top_values", beside="prompt_top_indptr"),
)
RESULT_HIDDEN_STATES = (*_required(U32, "indptr"), *_required(U8, "states"))

PLAN_MESSAGES = MappingProxyType(
    {
        "RowColumns": ROWS,
        "TokenColumns": TOKENS,
        "PageTable": PAGE_TABLE,
        "PageOperations": PAGE_OPERATIONS,
        "SamplingColumns": SAMPLING,
        "PenaltyColumns": PENALTIES,
        "MaskColumns": MASKS,
        "Mask": MASK,
        "LogprobColumns": LOGPROBS,
        "PlanDelta": DELTA,
        "WriteWindow": WRITE_WINDOW,
    }
)
RESULT_MESSAGES = MappingProxyType(
    {
        "ResultColumns": RESULT_ROWS,
        "ResultLogprobs": RESULT_LOGPROBS,
        "ResultHiddenStates": RESULT_HIDDEN_STATES,
    }
)
"""The columns of every message that has some, by the message's name."""


def pack(columns: tuple[Column, ...], source: object, *, message: Any) -> None:
    """Write the columns of `source` into `message`. An empty array is written as absent.

    The arrays' element types are asserted: a silent conversion could wrap a number.
    """
    for column in columns:
        array = getattr(source, column.name)
        if array is not None and len(array):
            setattr(message, column.name, array_bytes(column, array))


def array_bytes(column: Column, array: np.ndarray) -> bytes:
    """The little-endian bytes of one column."""
    assert array.dtype == column.dtype, f"{column.name} is {array.dtype}, the schema says {column.dtype}"
    assert array.ndim == 1, f"{column.name} has {array.ndim} dimensions"
    return array.tobytes()


def unpack(
    columns: tuple[Column, ...], message: Any, *, group: str, error: type[EngineError]
) -> dict[str, np.ndarray | None]:
    """The columns of `message` by name, as read-only views of its bytes.

    Raises:
        EngineError: `error`, when a column's length is no multiple of its element size; names `group` and column.
    """
    arrays: dict[str, np.ndarray | None] = {}
    for column in columns:
        content = getattr(message, column.name)
        if content:
            arrays[column.name] = view(column, content, group=group, error=error)
        elif column.optional and not (column.beside and getattr(message, column.beside)):
            arrays[column.name] = None
        else:
            arrays[column.name] = EMPTY[column.dtype]
    return arrays


def view(column: Column, content: bytes, *, group: str, error: type[EngineError]) -> np.ndarray:
    """`content` as a read-only array.

    Raises:
        EngineError: `error`, when its length is no multiple of the element size.
    """
    size = column.dtype.itemsize
    if len(content) % size:
        name = f"{group}.{column.name}"
        raise error(f"{name} has {len(content)} bytes, not a multiple of its element size {size}", field=name)
    return np.frombuffer(content, column.dtype)
