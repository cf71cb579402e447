"""Builders of worker infos and of valid plans with right page tables, for every suite.

A plan is described by rows (`Row`); pages come from one running counter per sub-pool unless a row names its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from protos.wire.enums import Feature, ForwardMode, GraphPhase, GraphRefusal, HiddenMode, SubPoolKind
from protos.wire.plan import (
    Forward,
    ForwardPlan,
    GraphChoice,
    LogprobColumns,
    Mask,
    MaskColumns,
    PageOperations,
    PageTable,
    PenaltyColumns,
    PlanDelta,
    PlanIdentity,
    RowColumns,
    SamplingColumns,
    TokenColumns,
)
from protos.wire.worker_info import Buckets, Fingerprints, SubPool, WorkerInfo, WorkerLimits

INCARNATION = bytes(range(16))
ALL_MODES = frozenset({ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED, ForwardMode.IDLE})
PLAIN_FEATURES = frozenset({Feature.TOKEN_REFERENCES, Feature.OUTPUT_LOGPROBS})
CORE_FEATURES = PLAIN_FEATURES | {Feature.PENALTIES, Feature.MASKS, Feature.LOGIT_BIAS}
"""What the scheduling core can use."""
MANY_FEATURES = frozenset(Feature) - {
    Feature.SPECULATION,
    Feature.ADAPTERS,
    Feature.RECURRENT_STATE,
    Feature.KV_TRANSFER,
    Feature.SPLIT_PREFILL,
    Feature.BLOCK_DIFFUSION,
    Feature.ATTENTION_DP,
    Feature.TIERED_KV,
}


def full_sub_pool(*, num_pages: int = 1024, page_size: int = 16) -> SubPool:
    return SubPool(kind=SubPoolKind.FULL, num_pages=num_pages, page_size=page_size, bytes_per_page=page_size * 1024)


def window_sub_pool(*, num_pages: int = 256, page_size: int = 16, window_tokens: int = 64) -> SubPool:
    return SubPool(
        kind=SubPoolKind.WINDOW,
        num_pages=num_pages,
        page_size=page_size,
        bytes_per_page=page_size * 1024,
        window_tokens=window_tokens,
    )


def make_limits(**changes: int) -> WorkerLimits:
    limits = WorkerLimits(
        max_rows=256,
        max_tokens=2048,
        max_plan_bytes=8 << 20,
        window=2,
        cached_results=4,
        context_tokens=2048,
        max_logprobs=20,
    )
    return replace(limits, **changes)


def make_info(
    *,
    sub_pools: Sequence[SubPool] = (),
    features: frozenset[Feature] = PLAIN_FEATURES,
    buckets: Sequence[Buckets] = (),
    limits: WorkerLimits | None = None,
    **changes: Any,
) -> WorkerInfo:
    """A worker with one full sub-pool of 1024 pages of 16, 49152 logits, and the plain features."""
    info = WorkerInfo(
        incarnation=INCARNATION,
        protocol=1,
        features=features,
        sub_pools=tuple(sub_pools) or (full_sub_pool(),),
        limits=limits or make_limits(),
        logits_width=49152,
        buckets=tuple(buckets),
        modes=ALL_MODES,
        numerics="reproducible",
        dtype="float32",
        device="cpu",
        model_name="tiny",
        fingerprints=Fingerprints(weights="w" * 64, tokenizer="t" * 64, kv_layout="k" * 64),
        max_hidden_mode=HiddenMode.NULL,
        kernels="torch",
        version="0.1.0",
    )
    return replace(info, **changes)


def make_full_info(**changes: Any) -> WorkerInfo:
    """A worker with a full and a window sub-pool, every feature of this round, and captured buckets."""
    values: dict[str, Any] = {
        "sub_pools": (full_sub_pool(), window_sub_pool()),
        "features": MANY_FEATURES,
        "max_hidden_mode": HiddenMode.FULL,
        # As many as the rich plan asks for.
        "limits": make_limits(max_hidden_states=17),
        "buckets": (
            Buckets(phase=GraphPhase.DECODE, sizes=(1, 2, 4, 8, 16), live=(1, 2, 4, 8, 16)),
            Buckets(phase=GraphPhase.PREFILL, sizes=(16, 32, 64), live=(16, 32), slots=8),
        ),
    }
    return make_info(**(values | changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row: `extend` tokens after `cached` ones."""

    cached: int = 0
    extend: int = 1
    samples: int = 1
    handle: int | None = None
    attempt: int = 0
    ids: Sequence[int] | None = None
    reference: tuple[int, int] | None = None
    """(seq, row): the row's last token is a reference."""
    pages: Sequence[int] | None = None
    """Pages in sub-pool 0. None: the next free ones."""


@dataclass(slots=True)
class Pages:
    """Hands out pages 1, 2, 3 ... of each sub-pool."""

    next_page: list[int] = field(default_factory=lambda: [1, 1, 1, 1])

    def take(self, sub_pool: int, count: int) -> list[int]:
        first = self.next_page[sub_pool]
        self.next_page[sub_pool] += count
        return list(range(first, first + count))


def extend(cached: int, length: int, **changes: Any) -> Row:
    return Row(cached=cached, extend=length, **changes)


def decode(cached: int, **changes: Any) -> Row:
    """One new token after `cached` ones."""
    return Row(cached=cached, **changes)


def make_identity(*, seq: int = 1, **changes: Any) -> PlanIdentity:
    return replace(PlanIdentity(epoch=7, term=3, seq=seq, incarnation=INCARNATION, budget_ms=5000), **changes)


def make_plan(
    rows: Sequence[Row],
    *,
    info: WorkerInfo | None = None,
    mode: ForwardMode | None = None,
    forwards: Sequence[Forward] | None = None,
    seq: int = 1,
    pages: Pages | None = None,
    **groups: Any,
) -> ForwardPlan:
    """A valid plan of `rows`. Its mode is the one that fits unless given; `groups` are further ForwardPlan fields."""
    info = info or make_info()
    pages = pages or Pages()
    if forwards is None:
        forwards = (whole_forward(rows, mode=mode),)
    values: dict[str, Any] = {
        "identity": make_identity(seq=seq),
        "forwards": tuple(forwards),
        "rows": _row_columns(rows),
        "tokens": _token_columns(rows),
        "page_tables": tuple(
            _page_table(index, sub_pool, rows, pages=pages) for index, sub_pool in enumerate(info.sub_pools)
        ),
    }
    return ForwardPlan(**(values | groups))


def whole_forward(rows: Sequence[Row], *, mode: ForwardMode | None = None, **changes: Any) -> Forward:
    mode = mode or fitting_mode(rows)
    forward = Forward(mode=mode, logical_mode=mode, row_begin=0, row_end=len(rows), graph=GraphRefusal.DISABLED)
    return replace(forward, **changes)


def fitting_mode(rows: Sequence[Row]) -> ForwardMode:
    if not rows:
        return ForwardMode.IDLE
    ones = [row.extend == 1 and row.cached > 0 for row in rows]
    if all(ones):
        return ForwardMode.DECODE
    return ForwardMode.MIXED if any(ones) else ForwardMode.EXTEND


def make_decode_plan(num_rows: int, *, context: int = 32, **changes: Any) -> ForwardPlan:
    """`num_rows` decode rows of `context` cached tokens each."""
    return make_plan([decode(context) for _ in range(num_rows)], **changes)


def make_extend_plan(lengths: Sequence[int], **changes: Any) -> ForwardPlan:
    """One row per length, each from position 0."""
    return make_plan([extend(0, length) for length in lengths], **changes)


def make_mixed_plan(**changes: Any) -> ForwardPlan:
    """Two decode rows, a chunk in the middle of a prompt that does not sample, and a whole prompt."""
    return make_plan([decode(20), decode(33), extend(16, 16, samples=0), extend(0, 9)], **changes)


def make_idle_plan(**changes: Any) -> ForwardPlan:
    return make_plan([], **changes)


def make_rich_plan(info: WorkerInfo | None = None, *, seq: int = 9) -> ForwardPlan:
    """A valid plan that uses every group and column this round knows, the delta and later rounds' columns apart."""
    info = info or make_full_info()
    rows = [decode(20, reference=(seq - 1, 0)), decode(150, samples=1), extend(16, 16, samples=0), extend(0, 9)]
    plan = make_plan(
        rows,
        info=info,
        seq=seq,
        page_operations=PageOperations(
            kinds=u8(1, 2), orders=u8(1, 2), sub_pools=u32(0, 1), sources=i32(900, 0), targets=i32(901, 200)
        ),
        sampling=SamplingColumns(
            temperatures=f32(0.5, 0, 0, 1.5),
            top_ks=u32(0, 5, 0, 40),
            top_ps=f32(1, 0.5, 1, 0.9),
            min_ps=f32(0, 0, 0, 0.1),
            seeds=u64(1, 2, 3, 2**64 - 1),
            bias_indptr=u32(0, 2, 2, 2, 3),
            bias_ids=u32(1, info.logits_width - 1, 7),
            bias_values=f32(-1, 2.5, 100),
        ),
        penalties=PenaltyColumns(
            repetition=f32(1, 1.2, 1, 1),
            frequency=f32(0, 0.5, 0, 0),
            presence=f32(0, -0.5, 0, 0),
            prompt_indptr=u32(0, 0, 3, 3, 3),
            prompt_ids=u32(5, 6, 7),
            output_indptr=u32(0, 0, 2, 2, 2),
            output_ids=u32(5, 9),
            output_counts=u32(1, 4),
        ),
        masks=MaskColumns(masks=make_masks(info.logits_width), row_masks=u32(1, 2, 0, 3)),
        logprobs=LogprobColumns(
            output_wanted=u8(1, 1, 0, 0),
            output_top_counts=u8(0, 5, 0, 0),
            prompt_starts=i32(21, 151, 20, 9),
            prompt_top_counts=u8(0, 0, 2, 0),
            target_indptr=u32(0, 0, 0, 12, 12),
            target_ids=i32(*range(12)),
        ),
    )
    return replace(
        plan,
        rows=replace(
            plan.rows,
            sample_indices=u32(0, 3, 0, 1),
            hidden_modes=u8(1, 2, 3, 1),
            canary_seeds=u64(11, 12, 13, 2**63),
            canary_hashes=u64(5, 0, 2**64 - 1, 7),
        ),
        identity=replace(
            plan.identity,
            traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            required_features=(Feature.TOKEN_REFERENCES, Feature.MASKS),
        ),
    )


def make_masks(logits_width: int) -> tuple[Mask, ...]:
    bits = np.zeros((logits_width + 7) // 8, np.uint8)
    bits[0] = 0b101
    return (Mask(allowed_bits=bits), Mask(allowed_ids=u32(3, 4)), Mask(denied_ids=u32(0, 1)))


def make_delta(base: ForwardPlan, *, digest: bytes) -> PlanDelta:
    num_rows = base.rows.num_rows
    return PlanDelta(
        base_seq=base.identity.seq, base_digest=digest, base_rows=np.arange(1, num_rows + 1, dtype=np.uint32)
    )


def graph_choice(phase: GraphPhase, bucket: int) -> GraphChoice:
    return GraphChoice(phase=phase, bucket=bucket)


def with_value(plan: ForwardPlan, path: str, value: Any) -> ForwardPlan:
    """`plan` with another value at a dotted path, such as `rows.seq_lens` or `page_tables.0.indices`."""
    name, _, rest = path.partition(".")
    if not rest:
        return _with_field(plan, name, value)
    return _with_field(plan, name, with_value(_read_field(plan, name), rest, value))


def with_element(plan: ForwardPlan, path: str, index: int, value: float) -> ForwardPlan:
    """`plan` with another element in the column at a dotted path."""
    array = read_value(plan, path).copy()
    array[index] = value
    return with_value(plan, path, array)


def read_value(source: Any, path: str) -> Any:
    for name in path.split("."):
        source = _read_field(source, name)
    return source


def _read_field(source: Any, name: str) -> Any:
    return source[int(name)] if isinstance(source, tuple) else getattr(source, name)


def _with_field(source: Any, name: str, value: Any) -> Any:
    if not isinstance(source, tuple):
        return replace(source, **{name: value})
    index = int(name)
    return (*source[:index], value, *source[index + 1 :])


def u8(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def _row_columns(rows: Sequence[Row]) -> RowColumns:
    handles = [100 + index if row.handle is None else row.handle for index, row in enumerate(rows)]
    return RowColumns(
        handles=u64(*handles),
        attempts=u32(*(row.attempt for row in rows)),
        seq_lens=i32(*(row.cached + row.extend for row in rows)),
        extend_lens=i32(*(row.extend for row in rows)),
        first_positions=i32(*(row.cached for row in rows)),
        samples=u8(*(row.samples for row in rows)),
    )


def _token_columns(rows: Sequence[Row]) -> TokenColumns:
    ids: list[int] = []
    sources: list[int] = []
    references: list[tuple[int, int]] = []
    for index, row in enumerate(rows):
        row_ids = list(row.ids) if row.ids is not None else [(7 * index + k) % 1000 for k in range(row.extend)]
        row_sources = [0] * row.extend
        if row.reference is not None:
            row_ids[-1], row_sources[-1] = 0, 1
            references.append(row.reference)
        ids += row_ids
        sources += row_sources
    if not references:
        return TokenColumns(ids=i32(*ids))
    return TokenColumns(
        ids=i32(*ids),
        sources=u8(*sources),
        ref_seqs=u64(*(seq for seq, _ in references)),
        ref_rows=u32(*(row for _, row in references)),
    )


def _page_table(index: int, sub_pool: SubPool, rows: Sequence[Row], *, pages: Pages) -> PageTable:
    page_size = sub_pool.page_size
    indptr, indices, last_lens, starts, written = [0], [], [], [], []
    for row in rows:
        seq_len = row.cached + row.extend
        is_window = sub_pool.kind is SubPoolKind.WINDOW
        first_page = max(0, row.cached - sub_pool.window_tokens) // page_size if is_window else 0
        end_page = -(-seq_len // page_size)
        if row.pages is not None and index == 0:
            row_pages = list(row.pages)
        else:
            row_pages = pages.take(index, end_page - first_page)
        indices += row_pages
        indptr.append(len(indices))
        last_lens.append((seq_len - 1) % page_size + 1)
        starts.append(first_page * page_size)
        written += row_pages[row.cached // page_size - first_page :]
    return PageTable(
        sub_pool=index,
        indptr=i32(*indptr),
        indices=i32(*indices),
        last_page_lens=i32(*last_lens),
        written_pages=i32(*written),
        start_positions=i32(*starts) if any(starts) else None,
    )
