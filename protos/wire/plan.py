"""Frozen form of a forward plan: the columns as read-only NumPy arrays.

Made by `scheduler_svc/core/plan_builder` or by `codec.decode_plan`, read by validation and the worker's batch builder.
Knows nothing of protobuf. R = rows, T = tokens. A column that is `None` was absent. Element types are in `schema`.
"""

from dataclasses import dataclass, field

import numpy as np

from protos.wire.enums import ForwardMode, GraphPhase, GraphRefusal

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanIdentity:
    """Who sends a plan, to which life of the worker, and its place in the order."""

    epoch: int
    term: int
    seq: int
    """Contiguous from 1 within (epoch, term)."""
    incarnation: bytes
    """16 bytes, new at every worker start."""
    budget_ms: int = 0
    """Time the device may take, from the moment its thread takes the plan."""
    traceparent: str = ""
    required_features: tuple[int, ...] = ()
    """Values of `Feature`; unknown ones are refused, so they stay plain integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteWindow:
    """Which part of the plan's write slots a forward writes. Exactly one field is set."""

    columns: tuple[int, int] | None = None
    run: tuple[int, int] | None = None
    flat_index: Array | None = None
    """u32 [k]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphChoice:
    """A captured graph by phase and bucket (rows for decode, tokens for prefill)."""

    phase: GraphPhase
    bucket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Rows [row_begin, row_end), run as one forward."""

    mode: ForwardMode
    logical_mode: ForwardMode
    row_begin: int
    row_end: int
    graph: GraphChoice | GraphRefusal
    """The bucket to replay, or the bucket function's reason for running eagerly."""
    write_window: WriteWindow | None = None
    layers: tuple[int, int] | None = None
    """Split prefill only: [begin, end)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowColumns:
    """One request's place in the plan, per row."""

    handles: Array
    """u64 [R]: opaque, echoed."""
    attempts: Array
    """u32 [R]: echoed."""
    seq_lens: Array
    """i32 [R]: tokens in the sequence, this plan's included."""
    extend_lens: Array
    """i32 [R]: tokens computed by this plan."""
    first_positions: Array
    """i32 [R]: position of the row's first token; seq_lens - extend_lens."""
    samples: Array
    """u8 [R]: 1 = the row's last token is sampled from."""
    sample_indices: Array | None = None
    """u32 [R]"""
    dp_ranks: Array | None = None
    """u32 [R]"""
    hidden_modes: Array | None = None
    """u8 [R], values of `HiddenMode`"""
    canary_seeds: Array | None = None
    """u64 [R]"""
    canary_hashes: Array | None = None
    """u64 [R]: `canary_chain` after position first_position - 1; 0 = not known"""
    length_source_seqs: Array | None = None
    """u64 [R]"""
    length_source_rows: Array | None = None
    """u32 [R]"""

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.handles)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenColumns:
    """Input tokens, row after row. The `ref_` columns have one element per token whose source is 1, in token order."""

    ids: Array
    """i32 [T]: a literal's id; 0 for a reference."""
    sources: Array | None = None
    """u8 [T]: 0 literal, 1 reference. None: all literal."""
    ref_seqs: Array | None = None
    """u64: seq of the plan that sampled the token."""
    ref_rows: Array | None = None
    """u32: its row in that plan."""
    ref_offsets: Array | None = None
    """u32: which of that row's tokens. None: all 0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageTable:
    """Pages of one sub-pool in CSR form."""

    sub_pool: int
    indptr: Array
    """i32 [R + 1]"""
    indices: Array
    """i32 [indptr[R]]; never 0, the sink."""
    last_page_lens: Array
    """i32 [R]: used slots of the last page, 1..page_size."""
    written_pages: Array
    """i32: pages that hold positions [first_position, seq_len) of each row, row after row."""
    start_positions: Array | None = None
    """i32 [R]: position of the first slot of the first listed page. None: all 0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageOperations:
    """Page copies and clears, in order."""

    kinds: Array
    """u8: 1 copy, 2 zero"""
    orders: Array
    """u8: 1 before the forwards, 2 after them"""
    sub_pools: Array
    """u32"""
    sources: Array
    """i32"""
    targets: Array
    """i32"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingColumns:
    """Sampling of the rows. All [R]; `None`: the neutral value for all."""

    temperatures: Array | None = None
    """f32: 0 = greedy"""
    top_ks: Array | None = None
    """u32: 0 = off"""
    top_ps: Array | None = None
    """f32: 1 = off"""
    min_ps: Array | None = None
    """f32: 0 = off"""
    seeds: Array | None = None
    """u64"""
    bias_indptr: Array | None = None
    """u32 [R + 1]"""
    bias_ids: Array | None = None
    """u32"""
    bias_values: Array | None = None
    """f32"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PenaltyColumns:
    """Penalties and the token counts they need."""

    repetition: Array
    """f32 [R]: 1 = off"""
    frequency: Array
    """f32 [R]: 0 = off"""
    presence: Array
    """f32 [R]: 0 = off"""
    prompt_indptr: Array
    """u32 [R + 1]"""
    prompt_ids: Array
    """u32: distinct ids of the prompt"""
    output_indptr: Array
    """u32 [R + 1]"""
    output_ids: Array
    """u32: distinct ids of the output"""
    output_counts: Array
    """u32"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mask:
    """Which ids may be sampled. Exactly one field is set."""

    allowed_bits: Array | None = None
    """u8 [ceil(logits width / 8)], least significant bit first"""
    allowed_ids: Array | None = None
    """u32"""
    denied_ids: Array | None = None
    """u32"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskColumns:
    """Distinct masks, and which row uses which."""

    masks: tuple[Mask, ...]
    row_masks: Array
    """u32 [R]: 0 none, k = masks[k - 1]"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogprobColumns:
    """Wanted log-probabilities of the raw distribution."""

    output_wanted: Array | None = None
    """u8 [R]"""
    output_top_counts: Array | None = None
    """u8 [R]"""
    prompt_starts: Array | None = None
    """i32 [R]: seq_len = none"""
    prompt_top_counts: Array | None = None
    """u8 [R]"""
    target_indptr: Array | None = None
    """u32 [R + 1]"""
    target_ids: Array | None = None
    """i32"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanDelta:
    """The base this plan names its changes against."""

    base_seq: int
    base_digest: bytes
    base_rows: Array
    """u32 [R]: 0 = in full, k = row k - 1 of the base"""
    digest: bytes = b""
    """Of the plan that this stands for."""
    present: Array = field(default_factory=lambda: np.empty(0, np.uint8))
    """u8: which optional groups and soft columns that plan has, numbers of `delta_columns.PRESENCE`"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardPlan:
    """One scheduler step, complete."""

    identity: PlanIdentity
    forwards: tuple[Forward, ...]
    rows: RowColumns
    tokens: TokenColumns
    page_tables: tuple[PageTable, ...]
    page_operations: PageOperations | None = None
    sampling: SamplingColumns | None = None
    penalties: PenaltyColumns | None = None
    masks: MaskColumns | None = None
    logprobs: LogprobColumns | None = None
    delta: PlanDelta | None = None
    reserved: tuple[str, ...] = ()
    """Names of present column groups that belong to a later round; a worker refuses each."""
