"""How the rows of a plan are sampled, as columns. Pure. Rows that are greedy or do not sample carry neutral values."""

from dataclasses import replace

import numpy as np

from protos.wire.plan import SamplingColumns
from scheduler_svc.core.batch import PlannedRow
from scheduler_svc.core.events import Sampling
from scheduler_svc.core.rule_columns import BiasColumns

_NEUTRAL = Sampling()


def sampling_columns(rows: list[PlannedRow], bias: BiasColumns | None) -> SamplingColumns | None:
    """Columns of the rows that sample at random or have a bias, which `bias` is of all; None when there is none."""
    is_random = [row.samples and row.request.samples_at_random for row in rows]
    columns = _random_columns(rows, is_random) if any(is_random) else None
    if bias is None:
        return columns
    columns = columns or SamplingColumns()
    return replace(columns, bias_indptr=bias.indptr, bias_ids=bias.ids, bias_values=bias.values)


def unless_neutral(column: np.ndarray, neutral: int) -> np.ndarray | None:
    """The column; None if every element is neutral."""
    return None if bool((column == neutral).all()) else column


def _random_columns(rows: list[PlannedRow], is_random: list[bool]) -> SamplingColumns:
    used = [row.request.spec.sampling if flag else _NEUTRAL for row, flag in zip(rows, is_random, strict=True)]
    return SamplingColumns(
        temperatures=np.array([sampling.temperature for sampling in used], dtype=np.float32),
        top_ks=unless_neutral(np.array([sampling.top_k for sampling in used], dtype=np.uint32), 0),
        top_ps=unless_neutral(np.array([sampling.top_p for sampling in used], dtype=np.float32), 1),
        min_ps=unless_neutral(np.array([sampling.min_p for sampling in used], dtype=np.float32), 0),
        seeds=np.array([sampling.seed for sampling in used], dtype=np.uint64),
    )
