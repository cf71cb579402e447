"""A row's logits after its rules: repetition, frequency, presence, bias, mask, in this order and in float32.

One row at a time, in an array of its own, so that nothing of its batch-mates can change a bit of it; the model's logits
stay as they are. Knows nothing of plans.
"""

import numpy as np

from protos.wire.plan import Mask
from worker_svc.batch.logit_rules import LogitRules, RowPenalties

Array = np.ndarray


def ruled_row(row: Array, rules: LogitRules) -> Array:
    """[logits_width] float32, a new array; -inf where the mask forbids. `row` holds the model's logits."""
    ruled: Array = row.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        if rules.penalties is not None:
            _penalise(ruled, rules.penalties)
        if rules.bias is not None:
            ruled[rules.bias.ids] += rules.bias.values
    if rules.mask is not None:
        _mask(ruled, rules.mask)
    return ruled


def _penalise(ruled: Array, penalties: RowPenalties) -> None:
    output_ids, counts = penalties.output_ids, penalties.output_counts
    if penalties.referenced_ids:
        all_ids = np.concatenate([output_ids.repeat(counts), np.array(penalties.referenced_ids, np.uint32)])
        output_ids, counts = np.unique(all_ids, return_counts=True)
    if penalties.repetition != 1:
        ids = np.union1d(penalties.prompt_ids, output_ids)
        values = ruled[ids]
        ruled[ids] = np.where(values > 0, values / penalties.repetition, values * penalties.repetition)
    ruled[output_ids] -= penalties.frequency * counts.astype(np.float32)
    ruled[output_ids] -= penalties.presence


def _mask(ruled: Array, mask: Mask) -> None:
    if mask.denied_ids is not None:
        ruled[mask.denied_ids] = -np.inf
        return
    if mask.allowed_bits is not None:
        allowed = np.unpackbits(mask.allowed_bits, count=len(ruled), bitorder="little").astype(bool)
    else:
        allowed = np.zeros(len(ruled), bool)
        allowed[mask.allowed_ids] = True
    ruled[~allowed] = -np.inf
