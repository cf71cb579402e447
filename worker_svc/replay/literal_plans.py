"""Plans as the replaying worker can run them: references to tokens that it never sampled become literals.

Pure. Guards: penalties still count a token that has become a literal; a reference that the worker's ring would not
have answered stays one, so that its row fails here too.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from protos.service.recording_payloads import RecentTokens
from protos.wire.enums import Feature
from protos.wire.plan import ForwardPlan, PenaltyColumns, TokenColumns
from protos.wire.worker_info import WorkerInfo
from worker_svc.batch.positions import extend_positions, token_rows

Array = np.ndarray


KnownTokens = Mapping[tuple[int, int], tuple[int, int, int, int]]
"""By (plan, row): handle, attempt, position of the token that was sampled, and the token."""


def known_tokens(recent: RecentTokens) -> KnownTokens:
    """What a recording knows of the plans before it."""
    keys = zip(recent.seqs.tolist(), recent.rows.tolist(), strict=True)
    columns = (recent.handles, recent.attempts, recent.positions + 1, recent.token_ids)
    return dict(zip(keys, zip(*(column.tolist() for column in columns), strict=True), strict=True))


def with_literals(plan: ForwardPlan, known: KnownTokens, *, oldest_seq: int = 0) -> ForwardPlan:
    """`plan` with each reference to a token in `known` replaced by it; one that a worker would refuse stays.

    Args:
        plan: as recorded.
        known: tokens of plans that are not run here.
        oldest_seq: plans before it had left the worker's ring.
    """
    tokens = plan.tokens
    if not known or tokens.sources is None or tokens.ref_seqs is None or tokens.ref_rows is None:
        return plan
    places = np.flatnonzero(tokens.sources)
    owners = token_rows(plan.rows.extend_lens)[places]
    positions = extend_positions(plan.rows.first_positions, plan.rows.extend_lens)[places]
    ids, sources = tokens.ids.copy(), tokens.sources.copy()
    is_kept = np.ones(len(places), bool)
    replaced: dict[int, list[int]] = {}
    references = zip(tokens.ref_seqs.tolist(), tokens.ref_rows.tolist(), strict=True)
    for index, key in enumerate(references):
        row = int(owners[index])
        wanted = (int(plan.rows.handles[row]), int(plan.rows.attempts[row]), int(positions[index]))
        found = known.get(key)
        if found is None or found[:3] != wanted or key[0] < oldest_seq:
            continue
        ids[places[index]], sources[places[index]], is_kept[index] = found[3], 0, False
        replaced.setdefault(row, []).append(found[3])
    if not replaced:
        return plan
    penalties = plan.penalties and _counting(plan.penalties, replaced)
    return replace(plan, tokens=_tokens(tokens, ids, sources=sources, kept=is_kept), penalties=penalties)


def as_own(plan: ForwardPlan, info: WorkerInfo) -> ForwardPlan:
    """`plan` as if it had been made for this worker."""
    plan = replace(plan, identity=replace(plan.identity, incarnation=info.incarnation))
    if Feature.CANARY in info.features:
        return plan
    # It checks and changes no token.
    return replace(plan, rows=replace(plan.rows, canary_seeds=None, canary_hashes=None))


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
