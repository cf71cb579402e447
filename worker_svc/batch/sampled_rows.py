"""The groups of a batch for what its rows return: how those that sample do it, log-probabilities, hidden states.

Pure NumPy over the plan's columns; absent columns become their neutral values. Guards: the arrays are copies.
"""

import numpy as np

from protos.wire.enums import HiddenMode
from protos.wire.plan import ForwardPlan, LogprobColumns, SamplingColumns
from worker_svc.batch.logit_rules import logit_rules
from worker_svc.batch.row_groups import HiddenCaptureGroup, LogprobGroup, PromptLogprobGroup, SamplingGroup

Array = np.ndarray

_ALL_GREEDY = SamplingColumns()
_NONE_WANTED = LogprobColumns()


def sampling_group(plan: ForwardPlan, *, first_row: int, sampled: Array) -> SamplingGroup | None:
    """Sampling of the rows `first_row + sampled` of the plan; None if no row samples."""
    if not len(sampled):
        return None
    rows = first_row + sampled
    columns = plan.sampling or _ALL_GREEDY
    # Without seeds every row is greedy, whatever its temperature says.
    temperatures = columns.temperatures if columns.seeds is not None else None
    return SamplingGroup(
        rows=_frozen(sampled),
        positions=_frozen(plan.rows.seq_lens[rows].astype(np.int64) - 1),
        temperatures=_column(temperatures, rows, neutral=np.float32(0)),
        top_ks=_column(columns.top_ks, rows, neutral=np.uint32(0)),
        top_ps=_column(columns.top_ps, rows, neutral=np.float32(1)),
        min_ps=_column(columns.min_ps, rows, neutral=np.float32(0)),
        seeds=_column(columns.seeds, rows, neutral=np.uint64(0)),
        sample_indices=_column(plan.rows.sample_indices, rows, neutral=np.uint32(0)),
        rules=logit_rules(plan, rows),
    )


def logprob_group(
    plan: ForwardPlan, *, first_row: int, sampled: Array, prompt: PromptLogprobGroup | None = None
) -> LogprobGroup | None:
    """Log-probabilities of the rows `first_row + sampled` of the plan, and of input tokens; None if none is wanted."""
    columns = plan.logprobs or _NONE_WANTED
    rows = first_row + sampled
    wanted = _column(columns.output_wanted, rows, neutral=np.uint8(0)).astype(bool)
    top_counts = _column(columns.output_top_counts, rows, neutral=np.uint8(0)).astype(np.int64)
    if prompt is None and not (wanted.any() or top_counts.any()):
        return None
    return LogprobGroup(wanted=_frozen(wanted), top_counts=_frozen(top_counts), prompt=prompt)


def hidden_group(plan: ForwardPlan, rows: slice, *, server_mode: HiddenMode) -> HiddenCaptureGroup | None:
    """Hidden states of `rows` of the plan; None if no row returns any and the server keeps none.

    Args:
        plan: validated.
        rows: of one forward.
        server_mode: what every forward keeps at least.
    """
    column = plan.rows.hidden_modes
    num_rows = rows.stop - rows.start
    modes = np.full(num_rows, HiddenMode.NULL, np.uint8) if column is None else column[rows].copy()
    group = HiddenCaptureGroup(modes=_frozen(modes), server_mode=server_mode)
    return None if group.mode is HiddenMode.NULL else group


def _column(column: Array | None, rows: Array, *, neutral: np.generic) -> Array:
    if column is None:
        return _frozen(np.full(len(rows), neutral))
    return _frozen(column[rows])


def _frozen(array: Array) -> Array:
    array.setflags(write=False)
    return array
