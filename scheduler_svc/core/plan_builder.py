"""A batch as the columns of a forward plan.

Pure: reads the batch and the worker's facts, changes nothing. Per-row work is gathering scalars; the rest is NumPy.
"""

from dataclasses import replace

import numpy as np

from protos.wire.buckets import choose_bucket
from protos.wire.enums import Feature, ForwardMode, SubPoolKind
from protos.wire.plan import (
    Forward,
    ForwardPlan,
    GraphChoice,
    PageTable,
    PlanIdentity,
    RowColumns,
    TokenColumns,
)
from protos.wire.validate_features import COLUMN_FEATURES
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.batch import Batch, PlannedRow
from scheduler_svc.core.canary_columns import canary_columns
from scheduler_svc.core.input_columns import hidden_modes, input_asks, logprob_columns
from scheduler_svc.core.rule_columns import rule_columns
from scheduler_svc.core.sampling_columns import sampling_columns, unless_neutral
from scheduler_svc.core.worker_state import WorkerState

_LITERAL, _REFERENCE = 0, 1


def build_plan(worker: WorkerState, batch: Batch, *, budget_ms: int) -> ForwardPlan:
    """The plan with the worker's next seq."""
    rows = batch.rows()
    asks = input_asks(rows)
    columns = replace(_row_columns(rows, worker.info), hidden_modes=hidden_modes(asks))
    tokens = _token_columns(batch)
    rules = rule_columns(rows, logits_width=worker.info.logits_width)
    plan = ForwardPlan(
        identity=PlanIdentity(
            epoch=worker.epoch,
            term=worker.term,
            seq=worker.next_seq,
            incarnation=worker.info.incarnation,
            budget_ms=budget_ms,
        ),
        forwards=(_forward(batch, worker.info, num_tokens=len(tokens.ids)),),
        rows=columns,
        tokens=tokens,
        page_tables=tuple(
            _page_table(batch, columns, sub_pool=index, worker=worker) for index in range(len(worker.info.sub_pools))
        ),
        sampling=sampling_columns(rows, rules.bias),
        penalties=rules.penalties,
        masks=rules.masks,
        logprobs=logprob_columns(rows, asks),
    )
    features = _required_features(plan, worker.info)
    return replace(plan, identity=replace(plan.identity, required_features=features))


def _row_columns(rows: list[PlannedRow], info: WorkerInfo) -> RowColumns:
    canary_seeds, canary_hashes = canary_columns(rows, info)
    seq_lens = np.array([row.seq_len for row in rows], dtype=np.int32)
    first_positions = np.array([row.first_position for row in rows], dtype=np.int32)
    return RowColumns(
        handles=np.array([row.request.handle for row in rows], dtype=np.uint64),
        attempts=np.array([row.attempt for row in rows], dtype=np.uint32),
        seq_lens=seq_lens,
        extend_lens=seq_lens - first_positions,
        first_positions=first_positions,
        samples=np.array([row.samples for row in rows], dtype=np.uint8),
        sample_indices=unless_neutral(
            np.array([row.request.spec.sampling.sample_index for row in rows], dtype=np.uint32), 0
        ),
        canary_seeds=canary_seeds,
        canary_hashes=canary_hashes,
    )


def _token_columns(batch: Batch) -> TokenColumns:
    decode = [0 if row.source else row.request.tokens[row.first_position] for row in batch.decode]
    chunks = [row.request.tokens[row.first_position : row.seq_len] for row in batch.extend]
    ids = np.concatenate([np.array(decode, dtype=np.int32), *[np.array(chunk, dtype=np.int32) for chunk in chunks]])
    found = [row.source for row in batch.decode if row.source]
    if not found:
        return TokenColumns(ids=ids)
    sources = np.full(len(ids), _LITERAL, dtype=np.uint8)
    sources[: len(decode)] = [_REFERENCE if row.source else _LITERAL for row in batch.decode]
    return TokenColumns(
        ids=ids,
        sources=sources,
        ref_seqs=np.array([seq for seq, _ in found], dtype=np.uint64),
        ref_rows=np.array([row for _, row in found], dtype=np.uint32),
    )


def _page_table(batch: Batch, columns: RowColumns, *, sub_pool: int, worker: WorkerState) -> PageTable:
    """The pages that hold positions below each row's length, and of these the ones it writes."""
    page_size = worker.memory.page_size
    ends = -(-columns.seq_lens // page_size)
    lists = [row.request.holding.lists[sub_pool] for row in batch.rows() if row.request.holding]
    pages = [held.until(end) for held, end in zip(lists, ends.tolist(), strict=True)]
    indices = np.concatenate(pages)
    indptr = np.zeros(len(pages) + 1, dtype=np.int32)
    np.cumsum([len(held) for held in pages], out=indptr[1:])
    num_decode = len(batch.decode)
    written = [indices[indptr[1 : num_decode + 1] - 1]]
    for row, held in zip(batch.extend, lists[num_decode:], strict=True):
        written.append(held.between(row.first_position // page_size, -(-row.seq_len // page_size)))
    windowed = worker.memory.windows[sub_pool] is not None
    return PageTable(
        sub_pool=sub_pool,
        indptr=indptr,
        indices=indices,
        last_page_lens=(columns.seq_lens - 1) % page_size + 1,
        written_pages=np.concatenate(written),
        start_positions=np.array([held.first * page_size for held in lists], np.int32) if windowed else None,
    )


def _forward(batch: Batch, info: WorkerInfo, *, num_tokens: int) -> Forward:
    num_rows = len(batch.decode) + len(batch.extend)
    if not batch.extend:
        mode = ForwardMode.DECODE
    elif not batch.decode:
        mode = ForwardMode.EXTEND
    else:
        mode = ForwardMode.MIXED
    graph = choose_bucket(info.buckets, mode=mode, num_rows=num_rows, num_tokens=num_tokens)
    return Forward(mode=mode, logical_mode=mode, row_begin=0, row_end=num_rows, graph=graph)


def _required_features(plan: ForwardPlan, info: WorkerInfo) -> tuple[int, ...]:
    needed = {feature for _, read, feature in COLUMN_FEATURES if read(plan) is not None}
    if any(pool.kind == SubPoolKind.WINDOW for pool in info.sub_pools):
        needed.add(Feature.WINDOW_SUB_POOL)
    if any(isinstance(forward.graph, GraphChoice) for forward in plan.forwards):
        needed.add(Feature.GRAPHS)
    return tuple(sorted(int(feature) for feature in needed))
