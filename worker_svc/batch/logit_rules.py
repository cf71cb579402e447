"""What rows of a plan do to their logits before they are sampled: penalties, bias and a mask, per row.

Pure NumPy over the plan's columns; knows nothing of logits. Guards: the arrays are copies; a row that asks for nothing
has no rules.
"""

from dataclasses import dataclass

import numpy as np

from protos.wire.plan import ForwardPlan, Mask, MaskColumns, PenaltyColumns, SamplingColumns

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPenalties:
    """Penalties of one row and the ids they concern."""

    repetition: np.float32
    """1 = off."""
    frequency: np.float32
    """0 = off."""
    presence: np.float32
    """0 = off."""
    prompt_ids: Array
    """uint32: distinct ids of the prompt, as far as `repetition` needs them."""
    output_ids: Array
    """uint32: distinct ids of the output."""
    output_counts: Array
    """uint32: how often each came."""
    referenced_ids: tuple[int, ...] = ()
    """Output tokens that the plan's author did not know yet; they count like those it sent."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowBias:
    """What is added to the logits of which ids."""

    ids: Array
    """uint32, distinct"""
    values: Array
    """float32"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRules:
    """Of one row; at least one of them. Applied in this order."""

    penalties: RowPenalties | None = None
    bias: RowBias | None = None
    mask: Mask | None = None


def logit_rules(plan: ForwardPlan, rows: Array) -> dict[int, LogitRules]:
    """Rules by place in `rows`, rows of the plan that sample; a row without rules is left out."""
    penalties = [None] * len(rows) if plan.penalties is None else _penalties(plan.penalties, rows)
    biases = [None] * len(rows) if plan.sampling is None else _biases(plan.sampling, rows)
    masks = [None] * len(rows) if plan.masks is None else _masks(plan.masks, rows)
    return {
        place: LogitRules(penalties=penalties[place], bias=biases[place], mask=masks[place])
        for place in range(len(rows))
        if penalties[place] or biases[place] or masks[place]
    }


def _penalties(columns: PenaltyColumns, rows: Array) -> list[RowPenalties | None]:
    is_on = (columns.repetition != 1) | (columns.frequency != 0) | (columns.presence != 0)
    return [_row_penalties(columns, row) if is_on[row] else None for row in rows.tolist()]


def _row_penalties(columns: PenaltyColumns, row: int) -> RowPenalties:
    output = slice(columns.output_indptr[row], columns.output_indptr[row + 1])
    return RowPenalties(
        repetition=columns.repetition[row],
        frequency=columns.frequency[row],
        presence=columns.presence[row],
        prompt_ids=columns.prompt_ids[columns.prompt_indptr[row] : columns.prompt_indptr[row + 1]].copy(),
        output_ids=columns.output_ids[output].copy(),
        output_counts=columns.output_counts[output].copy(),
    )


def _biases(columns: SamplingColumns, rows: Array) -> list[RowBias | None]:
    indptr, ids, values = columns.bias_indptr, columns.bias_ids, columns.bias_values
    if indptr is None or ids is None or values is None:
        return [None] * len(rows)
    spans = [slice(indptr[row], indptr[row + 1]) for row in rows.tolist()]
    return [
        RowBias(ids=ids[span].copy(), values=values[span].copy()) if span.stop > span.start else None for span in spans
    ]


def _masks(columns: MaskColumns, rows: Array) -> list[Mask | None]:
    copies = [None, *(_copied(mask) for mask in columns.masks)]
    return [copies[number] for number in columns.row_masks[rows].tolist()]


def _copied(mask: Mask) -> Mask:
    return Mask(
        allowed_bits=None if mask.allowed_bits is None else mask.allowed_bits.copy(),
        allowed_ids=None if mask.allowed_ids is None else mask.allowed_ids.copy(),
        denied_ids=None if mask.denied_ids is None else mask.denied_ids.copy(),
    )
