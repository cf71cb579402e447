"""A result's columns read against the plan they answer: one answer a row."""

from typing import NamedTuple

import numpy as np

from protos.wire.enums import RowFailure, RowStatus
from protos.wire.result import ForwardResult, ResultColumns, ResultLogprobs
from scheduler_svc.core.batch import PlanInFlight
from scheduler_svc.core.events import TokenLogprob
from scheduler_svc.core.input_answers import input_answers
from scheduler_svc.core.prompt_account import InputAnswer

# Read once: walking an enum and reading its members costs more than the comparisons.
_TOKEN, _NONE, _FAILED = RowStatus.TOKEN, RowStatus.NONE, RowStatus.FAILED
_LOWEST_FAILURE, _HIGHEST_FAILURE = min(RowFailure), max(RowFailure)


class RowAnswers(NamedTuple):
    """What the rows gave, one element a row."""

    token_ids: list[int]
    """0 unless the row sampled."""
    failures: list[int]
    """Values of `RowFailure`, 0 for a good answer. Also set when the answer is not one the row can have."""
    logprobs: list[tuple[TokenLogprob, ...]]
    """Empty unless asked for."""
    inputs: list[InputAnswer | None]
    """Of input positions; None unless asked for."""


def read_answers(plan: PlanInFlight, result: ForwardResult, *, logits_width: int) -> RowAnswers:
    """One answer per planned row, in order. A row whose answer does not match counts as failed."""
    columns = result.rows
    num_rows = len(plan.rows)
    nothing: list[tuple[TokenLogprob, ...]] = [()] * num_rows
    if columns is None or len(columns.handles) != num_rows:
        return RowAnswers([0] * num_rows, [int(RowFailure.LIMIT)] * num_rows, nothing, [None] * num_rows)
    failures = _failures(plan, columns, logits_width=logits_width).tolist()
    logprobs = nothing if result.logprobs is None else _all_logprobs(plan, result.logprobs)
    inputs = input_answers(plan.rows, result, failures)
    return RowAnswers(columns.token_ids.tolist(), failures, logprobs, inputs)


def _failures(plan: PlanInFlight, columns: ResultColumns, *, logits_width: int) -> np.ndarray:
    """u8 [R]: values of `RowFailure`, 0 for a good answer."""
    samples = np.array([row.samples for row in plan.rows], dtype=np.bool_)
    expected = np.where(samples, _TOKEN, _NONE)
    answers_plan = (
        (columns.handles == plan.handles) & (columns.attempts == plan.attempts) & (columns.positions == plan.positions)
    )
    in_range = (columns.token_ids >= 0) & (columns.token_ids < logits_width)
    good = answers_plan & (columns.statuses == expected) & in_range
    failed = answers_plan & (columns.statuses == _FAILED)
    given = columns.failures if columns.failures is not None else np.zeros(len(samples), np.uint8)
    known = failed & (given >= _LOWEST_FAILURE) & (given <= _HIGHEST_FAILURE)
    return np.where(good, 0, np.where(known, given, RowFailure.LIMIT))


def _all_logprobs(plan: PlanInFlight, logprobs: ResultLogprobs) -> list[tuple[TokenLogprob, ...]]:
    wanted = [row.samples and row.request.spec.output_logprobs for row in plan.rows]
    return [_logprob(logprobs, row) if want else () for row, want in enumerate(wanted)]


def _logprob(logprobs: ResultLogprobs, row: int) -> tuple[TokenLogprob, ...]:
    if logprobs.output is None:
        return ()
    value = float(logprobs.output[row])
    indptr, ids, values = logprobs.output_top_indptr, logprobs.output_top_ids, logprobs.output_top_values
    if indptr is None or ids is None or values is None:
        return (TokenLogprob(logprob=value),)
    span = slice(int(indptr[row]), int(indptr[row + 1]))
    return (TokenLogprob(logprob=value, top_ids=tuple(ids[span].tolist()), top_values=tuple(values[span].tolist())),)
