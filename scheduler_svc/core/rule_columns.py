"""Rules of the rows that sample as columns of a plan: penalties, bias, masks. Pure.

Guards: a column exists only if a row needs it; equal masks are sent once.
"""

from typing import NamedTuple

import numpy as np

from protos.wire.plan import Mask, MaskColumns, PenaltyColumns
from scheduler_svc.core.batch import PlannedRow
from scheduler_svc.core.events import Sampling
from scheduler_svc.core.request_rules import KeyedMask, RequestRules, TokenCounts

_NEUTRAL = Sampling()
_NO_IDS = np.empty(0, np.uint32)
_NO_VALUES = np.empty(0, np.float32)


class BiasColumns(NamedTuple):
    """CSR over rows, as in `SamplingColumns`."""

    indptr: np.ndarray
    ids: np.ndarray
    values: np.ndarray


class RuleColumns(NamedTuple):
    """Of one plan."""

    penalties: PenaltyColumns | None = None
    bias: BiasColumns | None = None
    masks: MaskColumns | None = None


def rule_columns(rows: list[PlannedRow], *, logits_width: int) -> RuleColumns:
    """All of them; mostly no row has any."""
    if all(row.request.rules is None for row in rows):
        return RuleColumns()
    return RuleColumns(_penalty_columns(rows), _bias_columns(rows), _mask_columns(rows, logits_width=logits_width))


def _penalty_columns(rows: list[PlannedRow]) -> PenaltyColumns | None:
    """Strengths and counts; None when no row that samples has penalties."""
    counts = [_counts_of(row) for row in rows]
    if not any(counts):
        return None
    used = [row.request.spec.sampling if found else _NEUTRAL for row, found in zip(rows, counts, strict=True)]
    prompts = [found.prompt_ids if found else _NO_IDS for found in counts]
    outputs = [found.output_ids() if found else _NO_IDS for found in counts]
    return PenaltyColumns(
        repetition=np.array([sampling.repetition_penalty for sampling in used], np.float32),
        frequency=np.array([sampling.frequency_penalty for sampling in used], np.float32),
        presence=np.array([sampling.presence_penalty for sampling in used], np.float32),
        prompt_indptr=_indptr(prompts),
        prompt_ids=np.concatenate(prompts),
        output_indptr=_indptr(outputs),
        output_ids=np.concatenate(outputs),
        output_counts=np.concatenate([found.output_counts() if found else _NO_IDS for found in counts]),
    )


def _bias_columns(rows: list[PlannedRow]) -> BiasColumns | None:
    """Logit bias; None when no row that samples has one."""
    rules = [_rules_of(row) for row in rows]
    ids = [found.bias_ids if found else _NO_IDS for found in rules]
    if not any(map(len, ids)):
        return None
    values = [found.bias_values if found else _NO_VALUES for found in rules]
    return BiasColumns(_indptr(ids), np.concatenate(ids), np.concatenate(values))


def _mask_columns(rows: list[PlannedRow], *, logits_width: int) -> MaskColumns | None:
    """The distinct masks of the rows that sample; None when there is none."""
    places: dict[tuple[str, bytes], int] = {}
    masks: list[Mask] = []
    row_masks = np.zeros(len(rows), np.uint32)
    for index, row in enumerate(rows):
        found = _mask_of(row)
        if found is None:
            continue
        place = places.setdefault(found.key, len(masks) + 1)
        if place > len(masks):
            masks.append(_fitted(found.mask, logits_width))
        row_masks[index] = place
    return MaskColumns(masks=tuple(masks), row_masks=row_masks) if masks else None


def _rules_of(row: PlannedRow) -> RequestRules | None:
    return row.request.rules if row.samples else None


def _counts_of(row: PlannedRow) -> TokenCounts | None:
    rules = _rules_of(row)
    return rules.counts if rules else None


def _mask_of(row: PlannedRow) -> KeyedMask | None:
    rules = _rules_of(row)
    return rules.mask_at(row.seq_len - row.request.prompt_len) if rules else None


def _fitted(mask: Mask, logits_width: int) -> Mask:
    """A mask of bits, as long as the worker's logits are wide: ids beyond the grammar's vocabulary are forbidden."""
    bits = mask.allowed_bits
    if bits is None:
        return mask
    fitted = np.zeros(-(-logits_width // 8), np.uint8)
    common = min(len(bits), len(fitted))
    fitted[:common] = bits[:common]
    fitted[-1] &= 0xFF >> (-logits_width % 8)
    return Mask(allowed_bits=fitted)


def _indptr(parts: list[np.ndarray]) -> np.ndarray:
    indptr = np.zeros(len(parts) + 1, np.uint32)
    np.cumsum([len(part) for part in parts], out=indptr[1:])
    return indptr
