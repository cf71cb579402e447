"""The sampled tokens of the last few plans, so that a plan may name a token whose result its author has not seen.

Guards: a reference gives the right row's token at the right position, or fails its row; never another token.
"""

from dataclasses import dataclass

import numpy as np

from protos.wire.enums import RowStatus
from protos.wire.plan import ForwardPlan
from protos.wire.result import ResultColumns
from worker_svc.batch.positions import extend_positions, token_rows

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResolvedTokens:
    """A plan's tokens as literals."""

    ids: Array
    """[num_tokens] int64; 0 for a reference that leads nowhere."""
    failed: Array
    """[num_rows] bool: rows that have such a reference."""
    referenced: dict[int, tuple[int, ...]]
    """Tokens that a row's references gave, by row."""


class TokenMemory:
    """Bounded; used by the device thread."""

    def __init__(self, *, num_plans: int) -> None:
        self._num_plans = num_plans
        self._results: dict[int, ResultColumns] = {}

    def keep(self, seq: int, rows: ResultColumns) -> None:
        """Remember a plan's result and forget the oldest beyond the bound."""
        self._results[seq] = rows
        while len(self._results) > self._num_plans:
            del self._results[next(iter(self._results))]

    def forget(self) -> None:
        """A new term begins."""
        self._results.clear()

    def resolve(self, plan: ForwardPlan) -> ResolvedTokens:
        """The plan's tokens with every reference looked up."""
        tokens, num_rows = plan.tokens, plan.rows.num_rows
        ids = tokens.ids.astype(np.int64)
        failed = np.zeros(num_rows, bool)
        if tokens.sources is None or tokens.ref_seqs is None or tokens.ref_rows is None:
            return ResolvedTokens(ids=ids, failed=failed, referenced={})
        places = np.flatnonzero(tokens.sources)
        owners = token_rows(plan.rows.extend_lens)[places]
        positions = extend_positions(plan.rows.first_positions, plan.rows.extend_lens)[places]
        found = np.zeros(len(places), bool)
        for seq in np.unique(tokens.ref_seqs).tolist():
            of_plan = np.flatnonzero(tokens.ref_seqs == seq)
            is_right, sampled = self._look_up(
                plan, seq, source_rows=tokens.ref_rows[of_plan], owners=owners[of_plan], positions=positions[of_plan]
            )
            found[of_plan] = is_right
            ids[places[of_plan]] = sampled
        failed[owners[~found]] = True
        referenced: dict[int, tuple[int, ...]] = {}
        for row, token_id in zip(owners.tolist(), ids[places].tolist(), strict=True):
            referenced[row] = (*referenced.get(row, ()), token_id)
        return ResolvedTokens(ids=ids, failed=failed, referenced=referenced)

    def _look_up(
        self, plan: ForwardPlan, seq: int, *, source_rows: Array, owners: Array, positions: Array
    ) -> tuple[Array, Array]:
        """Whether each reference is right, and its token, 0 where it is not."""
        kept = self._results.get(seq)
        if kept is None:
            return np.zeros(len(owners), bool), np.zeros(len(owners), np.int64)
        is_inside = source_rows < len(kept.handles)
        sources = np.where(is_inside, source_rows, 0).astype(np.int64)
        if not len(kept.handles):
            return is_inside & False, np.zeros(len(owners), np.int64)
        is_right = (
            is_inside
            & (kept.statuses[sources] == RowStatus.TOKEN)
            & (kept.handles[sources] == plan.rows.handles[owners])
            & (kept.attempts[sources] == plan.rows.attempts[owners])
            & (kept.positions[sources] + 1 == positions)
        )
        return is_right, np.where(is_right, kept.token_ids[sources], 0).astype(np.int64)
