"""Chains of rows -> tokens and log-probabilities, by the distribution of `protos.wire.simulated_tokens`.

All rows at once; a row with penalties, bias or a mask takes the long way over a whole vector of logits, alone.
Guards: a row without rules, and one whose rules change nothing, get the same token.
"""

from dataclasses import dataclass, replace

import numpy as np

from protos.wire.plan import ForwardPlan, LogprobColumns, SamplingColumns
from protos.wire.result import ResultLogprobs
from protos.wire.simulated_tokens import LN2, MOST_RANKS, Draws, SimulatedVocabulary, drawn_ranks, mixed, uniforms
from worker_svc.batch.logit_rules import LogitRules, logit_rules
from worker_svc.sampling.ruled_row import ruled_row

Array = np.ndarray

_ALL_GREEDY = SamplingColumns()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledRows:
    """The rows that sample, S of them."""

    rows: Array
    """[S] int64: in the plan."""
    words: Array
    """[S] uint64: what orders each row's vocabulary."""
    token_ids: Array
    """[S] int64; 0 where nothing was left to sample."""
    has_candidate: Array
    """[S] bool"""


def sample_rows(
    plan: ForwardPlan,
    chains: Array,
    *,
    rows: Array,
    vocabulary: SimulatedVocabulary,
    referenced: dict[int, tuple[int, ...]],
) -> SampledRows:
    """The tokens of `rows` [S] of the plan.

    Args:
        plan: whose sampling, penalties and masks hold.
        chains: [num_rows] uint64, at each row's last token.
        rows: those that sample.
        vocabulary: of the model.
        referenced: tokens the plan's author did not know, by row; penalties count them.
    """
    words = mixed(chains[rows])
    draws = _draws(plan, rows)
    ranks = drawn_ranks(draws, num_ids=len(vocabulary.plain_ids))
    token_ids = vocabulary.ids_at(words, ranks)
    has_candidate = np.ones(len(rows), bool)
    for place, rules in logit_rules(plan, rows).items():
        picked = _ruled_token(
            vocabulary.logits(int(words[place])),
            rules,
            draws=draws,
            place=place,
            referenced_ids=referenced.get(int(rows[place]), ()),
        )
        has_candidate[place] = picked is not None
        token_ids[place] = picked or 0
    return SampledRows(rows=rows, words=words, token_ids=token_ids, has_candidate=has_candidate)


def row_logprobs(plan: ForwardPlan, sampled: SampledRows, *, vocabulary: SimulatedVocabulary) -> ResultLogprobs | None:
    """What the plan asks for of the raw distribution; None if it asks for nothing."""
    columns = plan.logprobs
    if columns is None:
        return None
    num_rows = plan.rows.num_rows
    wanted = _flags(columns.output_wanted, num_rows)
    counts = np.zeros(num_rows, np.int64) if columns.output_top_counts is None else columns.output_top_counts
    output = np.zeros(num_rows, np.float32)
    tops: list[tuple[int, Array]] = []
    for place, row in enumerate(sampled.rows.tolist()):
        if not sampled.has_candidate[place] or not (wanted[row] or counts[row]):
            continue
        output[row] = vocabulary.logits(int(sampled.words[place]))[sampled.token_ids[place]] if wanted[row] else 0
        ranks = np.arange(min(int(counts[row]), len(vocabulary.plain_ids)))
        tops.append((row, vocabulary.ids_at(sampled.words[place].repeat(len(ranks)), ranks)))
    return _packed(columns, num_rows, output=output, tops=tops)


def _packed(columns: LogprobColumns, num_rows: int, *, output: Array, tops: list[tuple[int, Array]]) -> ResultLogprobs:
    shown = output if columns.output_wanted is not None else None
    if columns.output_top_counts is None:
        return ResultLogprobs(output=shown)
    counts = np.zeros(num_rows + 1, np.uint32)
    for row, ids in tops:
        counts[row + 1] = len(ids)
    values = [(np.arange(len(ids)) + 1) * -LN2 for _, ids in tops]
    return ResultLogprobs(
        output=shown,
        output_top_indptr=np.cumsum(counts, dtype=np.uint32),
        output_top_ids=np.concatenate([np.zeros(0, np.int32), *(ids for _, ids in tops)]).astype(np.int32),
        output_top_values=np.concatenate([np.zeros(0, np.float32), *values]).astype(np.float32),
    )


def _draws(plan: ForwardPlan, rows: Array) -> Draws:
    columns = plan.sampling or _ALL_GREEDY
    # Without seeds every row is greedy, whatever its temperature says.
    temperatures = columns.temperatures if columns.seeds is not None else None
    chosen = _column(temperatures, rows, neutral=np.float32(0))
    draws = np.zeros(len(rows))
    if chosen.any():
        draws = uniforms(
            _column(columns.seeds, rows, neutral=np.uint64(0)),
            positions=plan.rows.seq_lens[rows] - 1,
            sample_indices=_column(plan.rows.sample_indices, rows, neutral=np.uint32(0)),
        )
    return Draws(
        temperatures=chosen,
        top_ks=_column(columns.top_ks, rows, neutral=np.uint32(0)),
        top_ps=_column(columns.top_ps, rows, neutral=np.float32(1)),
        min_ps=_column(columns.min_ps, rows, neutral=np.float32(0)),
        uniforms=draws,
    )


def _ruled_token(
    logits: Array, rules: LogitRules, *, draws: Draws, place: int, referenced_ids: tuple[int, ...]
) -> int | None:
    """The token of one row with rules; None if they leave nothing."""
    if rules.penalties is not None and referenced_ids:
        rules = replace(rules, penalties=replace(rules.penalties, referenced_ids=referenced_ids))
    ruled = ruled_row(logits, rules)
    order = np.argsort(-ruled, kind="stable")
    order = order[np.isfinite(ruled[order])]
    if not len(order):
        return None
    temperature = float(draws.temperatures[place])
    if temperature == 0:
        return int(order[0])
    scaled = (ruled[order].astype(np.float64) - float(ruled[order[0]])) / temperature
    weights = np.exp(scaled)
    top_k, top_p, min_p = int(draws.top_ks[place]), float(draws.top_ps[place]), float(draws.min_ps[place])
    weights = weights[: min(top_k or MOST_RANKS, MOST_RANKS)]
    if top_p < 1:
        before = np.cumsum(weights) - weights
        weights = weights[: max(int(np.searchsorted(before, top_p * weights.sum() - 1e-12, side="left")), 1)]
    if min_p > 0:
        weights = weights[: max(int(np.count_nonzero(weights >= min_p * (1 - 1e-9))), 1)]
    sums = np.cumsum(weights)
    drawn = int(np.searchsorted(sums, float(draws.uniforms[place]) * sums[-1], side="right"))
    return int(order[min(drawn, len(weights) - 1)])


def _column(column: Array | None, rows: Array, *, neutral: np.generic) -> Array:
    return np.full(len(rows), neutral) if column is None else column[rows]


def _flags(column: Array | None, num_rows: int) -> Array:
    return np.zeros(num_rows, bool) if column is None else column.astype(bool)
