"""What rows ask of their input positions, and the log-probabilities of sampled tokens, as columns of a plan.

And how much of it fits one result, which may cut chunks short.
"""

import numpy as np

from protos.wire.enums import HiddenMode
from protos.wire.limits import MAX_PROMPT_VALUES
from protos.wire.plan import LogprobColumns
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.batch import PlannedRow
from scheduler_svc.core.prompt_account import InputAsk
from scheduler_svc.core.request import Request
from scheduler_svc.core.sampling_columns import unless_neutral

Array = np.ndarray


def input_ask(row: PlannedRow) -> InputAsk | None:
    """What a row asks of its input positions; None: nothing."""
    account = row.request.account
    return None if account is None else account.ask(row.first_position, row.seq_len, samples=row.samples)


def input_asks(rows: list[PlannedRow]) -> list[InputAsk | None] | None:
    """What each row asks; None: none asks anything."""
    asks = [input_ask(row) for row in rows]
    return asks if any(ask is not None for ask in asks) else None


def hidden_modes(asks: list[InputAsk | None] | None) -> Array | None:
    """The plan's column; None where all are NULL."""
    if asks is None:
        return None
    modes = np.array([HiddenMode.NULL if ask is None else ask.hidden_mode for ask in asks], dtype=np.uint8)
    return unless_neutral(modes, HiddenMode.NULL)


def logprob_columns(rows: list[PlannedRow], asks: list[InputAsk | None] | None) -> LogprobColumns | None:
    """The plan's group; None where no row wants a log-probability."""
    wanted = [row.samples and row.request.spec.output_logprobs for row in rows]
    scored = asks is not None and any(ask is not None and ask.scores for ask in asks)
    if not any(wanted) and not scored:
        return None
    tops = [row.request.spec.top_logprobs if want else 0 for row, want in zip(rows, wanted, strict=True)]
    columns: dict[str, Array | None] = {}
    if any(wanted):
        columns["output_wanted"] = np.array(wanted, dtype=np.uint8)
        columns["output_top_counts"] = unless_neutral(np.array(tops, dtype=np.uint8), 0)
    if scored:
        assert asks is not None
        columns |= _prompt_columns(rows, asks)
    return LogprobColumns(**columns)


def _prompt_columns(rows: list[PlannedRow], asks: list[InputAsk | None]) -> dict[str, Array | None]:
    starts, counts, tops = [], [], []
    targets: list[Array] = []
    for row, ask in zip(rows, asks, strict=True):
        scores = 0 if ask is None else ask.scores
        starts.append(row.seq_len if ask is None else ask.score_start)
        counts.append(scores)
        tops.append(_top(row.request) if scores else 0)
        if ask is not None and scores:
            targets.append(_targets(row.request, ask))
    indptr = np.zeros(len(rows) + 1, dtype=np.uint32)
    np.cumsum(counts, out=indptr[1:])
    return {
        "prompt_starts": np.array(starts, dtype=np.int32),
        "prompt_top_counts": unless_neutral(np.array(tops, dtype=np.uint8), 0),
        "target_indptr": indptr,
        "target_ids": np.concatenate(targets),
    }


def _top(request: Request) -> int:
    return 0 if request.account is None else request.account.wants.top_logprobs


def _targets(request: Request, ask: InputAsk) -> Array:
    """The tokens that follow; 0 where the prompt ends and nothing is sampled."""
    known = request.tokens[ask.score_start + 1 : ask.score_start + 1 + ask.scores]
    targets = np.zeros(ask.scores, dtype=np.int32)
    targets[: len(known)] = known
    return targets


class InputRoom:
    """What is left of one plan's result for answers about input positions."""

    def __init__(self, info: WorkerInfo) -> None:
        self._states = info.limits.max_hidden_states
        self._values = MAX_PROMPT_VALUES

    def most_tokens(self, request: Request) -> int | None:
        """Longest chunk of the request that this result can answer for; None: any."""
        account = request.account
        if account is None or account.is_told:
            return None
        limits = []
        if account.wants.states is not None:
            limits.append(self._states)
        if account.wants.logprobs_from is not None:
            limits.append(self._values // self._values_each(request))
        return min(limits, default=None)

    def take(self, row: PlannedRow) -> None:
        """The plan carries that row."""
        ask = input_ask(row)
        if ask is not None:
            self._states -= ask.states
            self._values -= ask.scores * self._values_each(row.request)

    def _values_each(self, request: Request) -> int:
        return 1 + 2 * _top(request)
