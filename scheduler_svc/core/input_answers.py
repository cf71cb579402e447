"""A result's answers about input positions, read against what its plan asked: one answer a row, or none.

Guards: an answer of another shape than asked for is no answer, so nothing is ever put at a wrong position.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from protos.wire.enums import RowFailure
from protos.wire.result import ForwardResult, ResultHiddenStates, ResultLogprobs
from scheduler_svc.core.batch import PlannedRow
from scheduler_svc.core.input_columns import input_ask
from scheduler_svc.core.prompt_account import InputAnswer, InputAsk

Array = np.ndarray

_STATE_DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "bfloat16": np.dtype("<u2")}
_NO_VALUES = np.empty(0, np.float32)
_NO_STATES = np.empty((0, 0), np.float32)


def input_answers(rows: Sequence[PlannedRow], result: ForwardResult, failures: list[int]) -> list[InputAnswer | None]:
    """What each row got; None where it asked nothing or failed.

    A row whose answer is not what it asked for counts as failed from here on.
    """
    answers: list[InputAnswer | None] = [None] * len(rows)
    for index, row in enumerate(rows):
        ask = None if failures[index] else input_ask(row)
        if ask is not None:
            answers[index] = _answer(row, ask, index, result)
            if answers[index] is None:
                failures[index] = int(RowFailure.LIMIT)
    return answers


def _answer(row: PlannedRow, ask: InputAsk, index: int, result: ForwardResult) -> InputAnswer | None:
    account = row.request.account
    assert account is not None, "it asks"
    scores = _scores(ask, index, result.logprobs, top=account.wants.top_logprobs)
    states = _states(ask, index, result.hidden_states)
    if scores is None or states is None:
        return None
    return InputAnswer(ask, *scores, states)


def _scores(
    ask: InputAsk, index: int, logprobs: ResultLogprobs | None, *, top: int
) -> tuple[Array, Array, Array] | None:
    if not ask.scores:
        return _NO_VALUES, np.empty((0, top), np.int32), np.empty((0, top), np.float32)
    if logprobs is None or logprobs.prompt_indptr is None or logprobs.prompt is None:
        return None
    begin, end = int(logprobs.prompt_indptr[index]), int(logprobs.prompt_indptr[index + 1])
    if end - begin != ask.scores:
        return None
    values = logprobs.prompt[begin:end]
    if not top:
        return values, np.empty((len(values), 0), np.int32), np.empty((len(values), 0), np.float32)
    indptr, ids, best = logprobs.prompt_top_indptr, logprobs.prompt_top_ids, logprobs.prompt_top_values
    if indptr is None or ids is None or best is None or (np.diff(indptr[begin : end + 1]) != top).any():
        return None
    span = slice(int(indptr[begin]), int(indptr[end]))
    return values, ids[span].reshape(-1, top), best[span].reshape(-1, top)


def _states(ask: InputAsk, index: int, given: ResultHiddenStates | None) -> Array | None:
    if not ask.states:
        return _NO_STATES
    if given is None or given.hidden_size == 0:
        return None
    begin, end = int(given.indptr[index]), int(given.indptr[index + 1])
    if end - begin != ask.states:
        return None
    table = given.states.view(_STATE_DTYPES[given.dtype]).reshape(-1, given.hidden_size)
    return table[begin:end]
