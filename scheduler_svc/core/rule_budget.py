"""Keeps the penalty tables, biases and masks of one plan within its size: rows beyond wait, longest waiting first."""

from protos.wire.limits import MAX_PLAN_BYTES, MAX_PLAN_MASKS
from scheduler_svc.core.batch import Batch, PlannedRow

MAX_RULE_BYTES = MAX_PLAN_BYTES // 2
"""Of all rows of a plan, equal masks counted each; the other half is for everything else."""


def within_rule_bytes(batch: Batch) -> Batch:
    """The batch without rows whose rules do not fit; one such row always does."""
    sizes = {row.request.handle: _num_bytes(row) for row in batch.rows() if row.samples and row.request.rules}
    if sum(sizes.values()) <= MAX_RULE_BYTES and len(sizes) <= MAX_PLAN_MASKS:
        return batch
    ruled = [row.request for row in batch.rows() if row.request.handle in sizes]
    ruled.sort(key=lambda request: request.sample_source or (0, 0))
    left, kept = MAX_RULE_BYTES, set[int]()
    for request in ruled[:MAX_PLAN_MASKS]:
        left -= sizes[request.handle]
        if left < 0 and kept:
            break
        kept.add(request.handle)
    dropped = sizes.keys() - kept
    return Batch(decode=_without(batch.decode, dropped), extend=_without(batch.extend, dropped))


def _num_bytes(row: PlannedRow) -> int:
    rules = row.request.rules
    return rules.num_bytes_at(row.seq_len - row.request.prompt_len) if rules else 0


def _without(rows: list[PlannedRow], handles: set[int]) -> list[PlannedRow]:
    return [row for row in rows if row.request.handle not in handles]
