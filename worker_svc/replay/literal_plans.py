"""Plans without references to tokens that this replay never sampled: those become literals.

Pure. Guards: penalties still count a token that has become a literal.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from protos.wire.errors import DataFault
from protos.wire.plan import ForwardPlan, PenaltyColumns, TokenColumns

Array = np.ndarray


def with_literals(plan: ForwardPlan, known: Mapping[int, Array]) -> ForwardPlan:
    """`plan` with each reference to a plan in `known` replaced by the token that it stands for.

    Args:
        plan: as recorded.
        known: sampled tokens by row, -1 for none, of plans that are not run here.

    Raises:
        DataFault: such a reference names a row without a token.
    """
    tokens = plan.tokens
    if tokens.sources is None or tokens.ref_seqs is None or tokens.ref_rows is None:
        return plan
    is_known = np.isin(tokens.ref_seqs, np.array(list(known), np.uint64))
    if not is_known.any():
        return plan
    places = np.flatnonzero(tokens.sources)
    owners = np.repeat(np.arange(plan.rows.num_rows), plan.rows.extend_lens)[places]
    ids, sources = tokens.ids.copy(), tokens.sources.copy()
    replaced: dict[int, list[int]] = {}
    for index in np.flatnonzero(is_known).tolist():
        sampled, row = known[int(tokens.ref_seqs[index])], int(tokens.ref_rows[index])
        if row >= len(sampled) or sampled[row] < 0:
            message = (
                f"plan {plan.identity.seq} refers to row {row} of plan {tokens.ref_seqs[index]}, which has no token"
            )
            raise DataFault(message, field="recording", plan_seq=plan.identity.seq)
        ids[places[index]], sources[places[index]] = sampled[row], 0
        replaced.setdefault(int(owners[index]), []).append(int(sampled[row]))
    penalties = plan.penalties and _counting(plan.penalties, replaced)
    return replace(plan, tokens=_tokens(tokens, ids, sources=sources, kept=~is_known), penalties=penalties)


def _tokens(tokens: TokenColumns, ids: Array, *, sources: Array, kept: Array) -> TokenColumns:
    if not sources.any():
        return TokenColumns(ids=ids)
    columns = (tokens.ref_seqs, tokens.ref_rows, tokens.ref_offsets)
    ref_seqs, ref_rows, ref_offsets = (None if column is None else column[kept] for column in columns)
    return TokenColumns(ids=ids, sources=sources, ref_seqs=ref_seqs, ref_rows=ref_rows, ref_offsets=ref_offsets)


def _counting(penalties: PenaltyColumns, replaced: Mapping[int, list[int]]) -> PenaltyColumns:
    """The counts with those tokens added to their rows' output."""
    num_rows = len(penalties.repetition)
    bounds = penalties.output_indptr
    ids, counts = [], []
    for row in range(num_rows):
        span = slice(bounds[row], bounds[row + 1])
        found = dict(zip(penalties.output_ids[span].tolist(), penalties.output_counts[span].tolist(), strict=True))
        for token_id in replaced.get(row, ()):
            found[token_id] = found.get(token_id, 0) + 1
        ids.append(list(found))
        counts.append(list(found.values()))
    return replace(
        penalties,
        output_indptr=np.cumsum([0, *(len(row_ids) for row_ids in ids)]).astype(np.uint32),
        output_ids=np.array([token_id for row_ids in ids for token_id in row_ids], np.uint32),
        output_counts=np.array([count for row_counts in counts for count in row_counts], np.uint32),
    )
