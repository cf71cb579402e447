"""What the rows of one plan gave: sampled forward by forward, packed as the result's columns.

Made per plan by the worker and dropped with it. Guards: handle, attempt and position are echoed for every row; a row
whose numbers are not finite, whose KV is another's, whose rules leave nothing to sample, or whose source failed, is
FAILED alone and carries no token.
"""

import numpy as np
from torch import Tensor

from protos.wire.enums import RowFailure, RowStatus
from protos.wire.plan import ForwardPlan
from protos.wire.result import ResultColumns, ResultHiddenStates, ResultLogprobs
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.batch.row_groups import BestLogits, LogprobGroup, SamplingGroup
from worker_svc.device.host_staging import ToHost, direct_to_host
from worker_svc.sampling.input_results import InputResults
from worker_svc.sampling.logprobs import SampledLogprobs, sampled_logprobs
from worker_svc.sampling.prompt_logprobs import OutputLayer, block_rows, prompt_logprobs
from worker_svc.sampling.sampler import sample

Array = np.ndarray


class RowResults:
    """Rows of a plan; those no forward ran stay NONE."""

    def __init__(self, plan: ForwardPlan, *, logits_width: int, to_host: ToHost = direct_to_host) -> None:
        self._to_host = to_host
        num_rows = plan.rows.num_rows
        self._plan = plan
        self._statuses = np.full(num_rows, RowStatus.NONE, np.uint8)
        self._token_ids = np.zeros(num_rows, np.int32)
        self._finite = np.ones(num_rows, bool)
        self._has_candidate = np.ones(num_rows, bool)
        self._is_corrupt = np.zeros(num_rows, bool)
        self._is_lost = np.zeros(num_rows, bool)
        self._logprobs = np.zeros(num_rows, np.float32)
        self._top: dict[int, tuple[Array, Array]] = {}
        self._inputs = InputResults(plan)
        self._block_rows = block_rows(logits_width)

    def add_sampled(
        self,
        logits: Tensor,
        group: SamplingGroup,
        *,
        first_row: int,
        wanted: LogprobGroup | None = None,
        best: BestLogits | None = None,
    ) -> None:
        """Sample a forward whose first row is `first_row` of the plan, with the log-probabilities it wants."""
        sampled = sample(logits, group, best=best, to_host=self._to_host)
        rows = first_row + group.rows
        self._statuses[rows] = RowStatus.TOKEN
        self._token_ids[rows] = sampled.token_ids
        self._finite[rows] &= sampled.finite
        self._has_candidate[rows] = sampled.has_candidate
        if wanted is not None:
            self._add_logprobs(sampled_logprobs(logits, sampled, wanted, best=best), rows)

    def add_finite(self, finite: Array, *, first_row: int) -> None:
        """[num_reqs] bool of that forward: whether each row's last hidden state is finite, sampling or not."""
        self._finite[first_row : first_row + len(finite)] &= finite

    def add_inputs(
        self,
        batch: ForwardBatch,
        *,
        last_hidden: Tensor,
        hidden: Tensor | None,
        logits_of: OutputLayer,
        first_row: int,
    ) -> None:
        """What that forward's rows want of their input tokens; a row fails if a log-probability is not finite.

        Args:
            batch: of the forward.
            last_hidden: [num_reqs, hidden_size]
            hidden: [num_tokens, hidden_size]; None where only each row's last is wanted.
            logits_of: the output layer.
            first_row: of the forward, in the plan.
        """
        wanted = None if batch.logprobs is None else batch.logprobs.prompt
        if wanted is not None:
            assert hidden is not None, "the batch wants all"
            given = prompt_logprobs(hidden, logits_of, wanted, max_rows=self._block_rows)
            np.logical_and.at(self._finite, first_row + wanted.rows, given.finite)
            self._inputs.add_prompt(wanted, given, first_row=first_row)
        if batch.hidden is not None:
            self._inputs.add_hidden(batch, last_hidden=last_hidden, hidden=hidden, first_row=first_row)

    def hidden_states(self) -> ResultHiddenStates | None:
        """What the plan asked for; None if it asked for nothing."""
        return self._inputs.hidden_states(self._failed)

    def add_corrupt(self, is_corrupt: Array, *, first_row: int) -> None:
        """[num_reqs] bool of that forward: rows whose KV did not hold their own tokens; they fail."""
        self._is_corrupt[first_row : first_row + len(is_corrupt)] |= is_corrupt

    def add_lost(self, rows: Array) -> None:
        """[R] bool: rows with a token that no earlier plan gave. What they computed means nothing."""
        self._is_lost |= rows

    def columns(self) -> ResultColumns:
        """Statuses, tokens and failures of all rows."""
        rows = self._plan.rows
        failed = self._failed
        reasons = np.where(self._finite, RowFailure.NO_CANDIDATE, RowFailure.NAN)
        reasons = np.where(self._is_corrupt, RowFailure.CANARY, reasons)
        reasons = np.where(self._is_lost, RowFailure.DEPENDENCY, reasons)
        return ResultColumns(
            handles=rows.handles.copy(),
            attempts=rows.attempts.copy(),
            positions=(rows.seq_lens - 1).astype(np.int32),
            statuses=np.where(failed, np.uint8(RowStatus.FAILED), self._statuses),
            token_ids=np.where(failed, np.int32(0), self._token_ids),
            failures=np.where(failed, reasons, 0).astype(np.uint8) if failed.any() else None,
            finite=(self._finite | self._is_lost).astype(np.uint8),
        )

    def logprobs(self) -> ResultLogprobs | None:
        """What the plan asked for; None if it asked for nothing."""
        wanted = self._plan.logprobs
        if wanted is None:
            return None
        failed = self._failed
        tops = {row: self._top[row] for row in sorted(self._top) if not failed[row]}
        counts = np.zeros(len(self._finite) + 1, np.uint32)
        for row, (ids, _) in tops.items():
            counts[row + 1] = len(ids)
        has_top = wanted.output_top_counts is not None
        return ResultLogprobs(
            output=np.where(failed, np.float32(0), self._logprobs) if wanted.output_wanted is not None else None,
            output_top_indptr=np.cumsum(counts, dtype=np.uint32) if has_top else None,
            output_top_ids=_joined([ids for ids, _ in tops.values()], np.int32) if has_top else None,
            output_top_values=_joined([values for _, values in tops.values()], np.float32) if has_top else None,
            **self._inputs.prompt_columns(failed),
        )

    @property
    def _failed(self) -> Array:
        return ~(self._finite & self._has_candidate) | self._is_corrupt | self._is_lost

    def _add_logprobs(self, logprobs: SampledLogprobs, rows: Array) -> None:
        self._logprobs[rows] = logprobs.tokens
        ends = np.cumsum(logprobs.top_counts)
        for k in np.flatnonzero(logprobs.top_counts):
            span = slice(ends[k] - logprobs.top_counts[k], ends[k])
            self._top[int(rows[k])] = (logprobs.top_ids[span], logprobs.top_values[span])


def _joined(parts: list[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate([np.empty(0, dtype), *parts])
