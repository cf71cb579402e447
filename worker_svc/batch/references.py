"""Tokens of a plan that earlier plans sampled: named by the plan, put in when the earlier plans have run.

Naming is NumPy over the plan's columns and needs no earlier result; putting in makes new batches and leaves the staged
ones alone. Guards: a row whose reference found nothing writes no KV (its slots become the sink) and is reported.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from protos.wire.plan import Forward, ForwardPlan
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.batch.logit_rules import LogitRules
from worker_svc.batch.positions import extend_positions, token_rows
from worker_svc.batch.row_groups import SamplingGroup
from worker_svc.device.token_ring import Found, TokenRing, Wanted

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class References:
    """n references of one plan, in token order. Host arrays."""

    tokens: Array
    """[n] int64: index of the token in the plan."""
    rows: Array
    """[n] int64: row it belongs to."""
    token_starts: Array
    """[R + 1] int64: index of each row's first token."""
    wanted: Wanted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResolvedReferences:
    """The references of one plan and what they found."""

    named: References
    found: Found
    host_ids: Array
    """[n] int32"""
    failed_rows: Array
    """[R] bool: a reference of the row found nothing."""


def plan_references(plan: ForwardPlan) -> References | None:
    """The references of a validated plan; None if every token is literal."""
    columns, rows = plan.tokens, plan.rows
    if columns.sources is None or columns.ref_seqs is None or columns.ref_rows is None:
        return None
    tokens = np.flatnonzero(columns.sources)
    owners = token_rows(rows.extend_lens)[tokens]
    starts = np.zeros(len(rows.extend_lens) + 1, np.int64)
    np.cumsum(rows.extend_lens, dtype=np.int64, out=starts[1:])
    return References(
        tokens=tokens,
        rows=owners,
        token_starts=starts,
        wanted=Wanted(
            seqs=columns.ref_seqs,
            rows=columns.ref_rows,
            handles=rows.handles[owners],
            attempts=rows.attempts[owners],
            positions=extend_positions(rows.first_positions, rows.extend_lens)[tokens],
        ),
    )


def resolve(named: References, ring: TokenRing) -> ResolvedReferences:
    """Look the references up. The plans they name must have run."""
    found = ring.find(named.wanted)
    failed = np.zeros(len(named.token_starts) - 1, bool)
    failed[named.rows[~found.is_found]] = True
    return ResolvedReferences(named=named, found=found, host_ids=found.ids.cpu().numpy(), failed_rows=failed)


def with_references(batch: ForwardBatch, forward: Forward, resolved: ResolvedReferences) -> ForwardBatch:
    """`batch`, made of `forward`, with its referenced tokens."""
    named = resolved.named
    rows = slice(forward.row_begin, forward.row_end)
    begin = int(named.token_starts[rows.start])
    inside = np.flatnonzero((named.rows >= rows.start) & (named.rows < rows.stop))
    if not len(inside):
        return batch
    device = batch.input_ids.device
    input_ids = batch.input_ids.clone()
    places = torch.from_numpy(named.tokens[inside] - begin).to(device)
    input_ids[places] = resolved.found.ids[torch.from_numpy(inside).to(device)]
    failed = resolved.failed_rows[rows]
    page_groups = batch.page_groups
    if failed.any():
        lost = torch.from_numpy(np.repeat(failed, np.diff(named.token_starts[rows.start : rows.stop + 1]))).to(device)
        page_groups = tuple(group.diverted(lost) for group in page_groups)
    sampling = batch.sampling
    if sampling is not None and sampling.rules:
        by_row: dict[int, list[int]] = {}
        for row, token_id in zip(named.rows[inside].tolist(), resolved.host_ids[inside].tolist(), strict=True):
            by_row.setdefault(row - rows.start, []).append(token_id)
        sampling = replace(sampling, rules=_rules(sampling, by_row))
    return replace(batch, input_ids=input_ids, page_groups=page_groups, sampling=sampling)


def _rules(sampling: SamplingGroup, by_row: Mapping[int, list[int]]) -> dict[int, LogitRules]:
    """The rules of the group; penalties count the tokens that a row references beside those the plan sent."""
    rules = dict(sampling.rules)
    for place, rule in sampling.rules.items():
        ids = by_row.get(int(sampling.rows[place]))
        if ids and rule.penalties is not None:
            rules[place] = replace(rule, penalties=replace(rule.penalties, referenced_ids=tuple(ids)))
    return rules
