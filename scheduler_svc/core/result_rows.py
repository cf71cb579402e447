"""A result's columns read against the plan they answer: one `RowAnswer` a row."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from protos.wire.enums import RowFailure, RowStatus
from protos.wire.result import ForwardResult, ResultColumns, ResultLogprobs
from scheduler_svc.core.batch import PlanInFlight
from scheduler_svc.core.events import TokenLogprob


class RowAnswer(NamedTuple):
    """What one row gave."""

    token_id: int
    """0 unless the row sampled."""
    failure: RowFailure | None
    """Also set when the answer is not one this row can have."""
    logprob: TokenLogprob | None


def read_answers(plan: PlanInFlight, result: ForwardResult, *, logits_width: int) -> Iterator[RowAnswer]:
    """One answer per planned row, in order. A row whose answer does not match counts as failed."""
    columns = result.rows
    num_rows = len(plan.rows)
    if columns is None or len(columns.handles) != num_rows:
        yield from [RowAnswer(0, RowFailure.LIMIT, None)] * num_rows
        return
    token_ids = columns.token_ids.tolist()
    failures = _failures(plan, columns, logits_width=logits_width).tolist()
    wants = [row.samples and row.request.spec.output_logprobs for row in plan.rows]
    for index, (token_id, failure, wanted) in enumerate(zip(token_ids, failures, wants, strict=True)):
        if failure:
            yield RowAnswer(0, RowFailure(failure), None)
        elif wanted and result.logprobs is not None:
            yield RowAnswer(token_id, None, _logprob(result.logprobs, index))
        else:
            yield RowAnswer(token_id, None, None)


def _failures(plan: PlanInFlight, columns: ResultColumns, *, logits_width: int) -> np.ndarray:
    """u8 [R]: values of `RowFailure`, 0 for a good answer."""
    samples = np.array([row.samples for row in plan.rows], dtype=np.bool_)
    expected = np.where(samples, RowStatus.TOKEN, RowStatus.NONE)
    answers_plan = (
        (columns.handles == plan.handles) & (columns.attempts == plan.attempts) & (columns.positions == plan.positions)
    )
    in_range = (columns.token_ids >= 0) & (columns.token_ids < logits_width)
    good = answers_plan & (columns.statuses == expected) & in_range
    failed = answers_plan & (columns.statuses == RowStatus.FAILED)
    given = columns.failures if columns.failures is not None else np.zeros(len(samples), np.uint8)
    known = failed & (given >= min(RowFailure)) & (given <= max(RowFailure))
    return np.where(good, 0, np.where(known, given, RowFailure.LIMIT))


def _logprob(logprobs: ResultLogprobs, row: int) -> TokenLogprob | None:
    if logprobs.output is None:
        return None
    value = float(logprobs.output[row])
    indptr, ids, values = logprobs.output_top_indptr, logprobs.output_top_ids, logprobs.output_top_values
    if indptr is None or ids is None or values is None:
        return TokenLogprob(logprob=value)
    span = slice(int(indptr[row]), int(indptr[row + 1]))
    return TokenLogprob(logprob=value, top_ids=tuple(ids[span].tolist()), top_values=tuple(values[span].tolist()))
