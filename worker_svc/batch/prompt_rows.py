"""The group of a batch for what is wanted of input tokens: log-probabilities of the tokens that follow.

Pure NumPy over the plan's columns. Guards: the arrays are copies; a position's place in the batch is its token's.
"""

import numpy as np

from protos.wire.plan import ForwardPlan
from worker_svc.batch.row_groups import PromptLogprobGroup

Array = np.ndarray


def prompt_logprob_group(plan: ForwardPlan, rows: slice, *, token_starts: Array) -> PromptLogprobGroup | None:
    """Wanted positions of those rows of the plan; None if there is none.

    Args:
        plan: validated.
        rows: of one forward.
        token_starts: [R + 1] index of each row's first token in the plan.
    """
    columns = plan.logprobs
    if columns is None or columns.prompt_starts is None:
        return None
    assert columns.target_indptr is not None, "validated"
    assert columns.target_ids is not None, "validated"
    ends = columns.target_indptr[rows.start : rows.stop + 1].astype(np.int64)
    counts = np.diff(ends)
    total = int(ends[-1] - ends[0])
    if not total:
        return None
    in_row = np.arange(total) - np.repeat(ends[:-1] - ends[0], counts)
    skipped = columns.prompt_starts[rows].astype(np.int64) - plan.rows.first_positions[rows]
    first_tokens = token_starts[rows.start : rows.stop] - token_starts[rows.start] + skipped
    tops = np.zeros(len(counts), np.int64)
    if columns.prompt_top_counts is not None:
        tops = columns.prompt_top_counts[rows].astype(np.int64)
    return PromptLogprobGroup(
        rows=_frozen(np.repeat(np.arange(len(counts)), counts)),
        token_rows=_frozen(np.repeat(first_tokens, counts) + in_row),
        target_ids=_frozen(columns.target_ids[ends[0] : ends[-1]].astype(np.int64)),
        top_counts=_frozen(np.repeat(tops, counts)),
    )


def _frozen(array: Array) -> Array:
    array.setflags(write=False)
    return array
