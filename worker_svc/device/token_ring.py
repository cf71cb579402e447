"""The tokens that the last few plans sampled, for rows of later plans that name them.

State of steps, never of requests: entries are overwritten in turn. Ids lie on the device, the tags that a reference
must match on the host. Guards: a reference to a plan that never ran, was rejected or left the ring, to a row that
failed or did not sample, or to the token of another sequence, attempt or position finds nothing; never a wrong token.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from protos.wire.enums import RowStatus
from protos.wire.result import ResultColumns

Array = np.ndarray
_Chosen: TypeAlias = "Array | slice"
_SAMPLED = int(RowStatus.TOKEN)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """n references, and what the token of each must be. All [n]."""

    seqs: Array
    """u64: plan that sampled it."""
    rows: Array
    """u32: its row there."""
    handles: Array
    """u64"""
    attempts: Array
    """u32"""
    positions: Array
    """i64: of the token in its sequence."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """What the ring holds of n references."""

    is_found: Array
    """[n] bool"""
    ids: Tensor
    """[n] int32 on the ring's device, owned; 0 where nothing was found."""


@dataclass(frozen=True, slots=True, eq=False)
class _Tags:
    seq: int
    handles: Array
    attempts: Array
    positions: Array
    """Of the sampled tokens."""
    is_sampled: Array


class TokenRing:
    """One per worker; used by the device thread only."""

    def __init__(self, *, num_plans: int, max_rows: int, device: torch.device) -> None:
        self._ids = torch.zeros((num_plans, max_rows), dtype=torch.int32, device=device)
        self._tags: list[_Tags | None] = [None] * num_plans

    def clear(self) -> None:
        """Forget every plan."""
        self._tags = [None] * len(self._tags)

    def keep(self, seq: int, rows: ResultColumns) -> None:
        """Take what plan `seq` gave, in the place of the plan that has been here longest."""
        place = seq % len(self._tags)
        self._ids[place, : len(rows.token_ids)] = torch.from_numpy(rows.token_ids).to(self._ids.device)
        self._tags[place] = _Tags(
            seq, rows.handles, rows.attempts, rows.positions.astype(np.int64) + 1, rows.statuses == _SAMPLED
        )

    def find(self, wanted: Wanted) -> Found:
        """The tokens that are here and are what they are said to be."""
        is_found = np.zeros(len(wanted.seqs), bool)
        named = set(wanted.seqs.tolist())
        for seq in named:
            tags = self._tags[seq % len(self._tags)]
            if tags is not None and tags.seq == seq:
                of_plan: _Chosen = slice(None) if len(named) == 1 else np.flatnonzero(wanted.seqs == seq)
                is_found[of_plan] = _matches(tags, wanted, of_plan)
        places = (wanted.seqs % np.uint64(len(self._tags))).astype(np.int64) * self._ids.shape[1] + wanted.rows
        places[~is_found] = 0
        ids = self._ids.view(-1)[torch.from_numpy(places).to(self._ids.device)]
        if not is_found.all():
            ids[torch.from_numpy(~is_found).to(ids.device)] = 0
        return Found(is_found=is_found, ids=ids)


def _matches(tags: _Tags, wanted: Wanted, chosen: _Chosen) -> Array:
    rows = wanted.rows[chosen].astype(np.int64)
    exists: Array = rows < len(tags.handles)
    if not exists.all():
        if not len(tags.handles):
            return exists
        rows = np.where(exists, rows, 0)
    matches: Array = (
        exists
        & tags.is_sampled[rows]
        & (tags.handles[rows] == wanted.handles[chosen])
        & (tags.attempts[rows] == wanted.attempts[chosen])
        & (tags.positions[rows] == wanted.positions[chosen])
    )
    return matches
