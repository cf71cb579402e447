"""KVCanary: proves on every read that the KV slots of a row hold the row's own tokens, and records every write.

Works in front of whatever computes: on write slots and page tables, not on KV. Checks a row's pages before its forward
runs. Guards: a row that would read another's tokens is named with position and slot within the step, and a refusing
canary lets it write nothing.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from protos.wire import canary_chain
from protos.wire.errors import UnsupportedFeature
from protos.wire.plan import RowColumns
from worker_svc.batch.canary_rows import RowLayout, RowReads, page_spans, row_layout, row_reads
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.batch.owned import Array
from worker_svc.kv.canary_table import CanaryTable
from worker_svc.kv.index_translator import IndexTranslator

logger = logging.getLogger(__name__)

OFF, COUNT, REFUSE = "off", "count", "refuse"
_LOGGED = 8
"""Violations of one forward that are logged one by one."""
_LOW = (1 << canary_chain.MIX_SHIFT) - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedRows:
    """What a plan says of the chains of a forward's rows. [num_reqs] int64 each, on the device."""

    seeds: Tensor
    hashes: Tensor
    """After the position before the row's first token; 0: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryViolation:
    """The first slot of a row, in one sub-pool, that does not hold what it should."""

    row: int
    """Of the forward."""
    position: int
    slot: int
    sub_pool: int
    found_token: int
    """What the slot holds; -1: it was never written."""
    found_position: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CanaryVerdict:
    """What one forward's check found. Made before the forward, read after it."""

    is_bad: Array
    """[num_reqs] bool"""
    violations: tuple[CanaryViolation, ...]
    """One per bad row and sub-pool."""

    def without(self, rows: Array) -> "CanaryVerdict":
        """The same of the other rows. `rows` is [num_reqs] bool."""
        if not (self.is_bad & rows).any():
            return self
        left = tuple(violation for violation in self.violations if not rows[violation.row])
        return CanaryVerdict(is_bad=self.is_bad & ~rows, violations=left)


class KVCanary:
    """Made after the translator, before attention; called by the thread that owns the device."""

    def __init__(self, translator: IndexTranslator, *, is_refusing: bool, device: torch.device) -> None:
        self._is_refusing = is_refusing
        self._device = device
        self._powers = _Powers(device)
        self.tables: Sequence[CanaryTable] = tuple(
            CanaryTable(num_pages=pool.geometry.num_pages, page_size=pool.geometry.page_size, device=device)
            for pool in translator.pools
        )

    @property
    def fails_rows(self) -> bool:
        """Whether a bad row is to fail."""
        return self._is_refusing

    def expected(self, rows: RowColumns, part: slice) -> ExpectedRows:
        """What a plan says of its rows `part`; a plan without the columns has seed 0 and unknown hashes."""
        zeros = np.zeros(part.stop - part.start, np.uint64)
        seeds = zeros if rows.canary_seeds is None else rows.canary_seeds[part]
        hashes = zeros if rows.canary_hashes is None else rows.canary_hashes[part]
        return ExpectedRows(seeds=self._signed(seeds), hashes=self._signed(hashes))

    def guard(self, batch: ForwardBatch, expected: ExpectedRows) -> tuple[ForwardBatch, CanaryVerdict]:
        """The batch to run, and what is wrong with what it reads. Records its writes.

        If bad rows are refused, they write to the sink in the new batch. Otherwise it is the same batch.
        """
        layout = row_layout(batch)
        reads = self._reads(batch, layout, expected)
        verdict = self._verdict(layout, reads, expected)
        if self._is_refusing and verdict.violations:
            batch = _diverted(batch, verdict.is_bad[layout.token_rows])
        self._record(batch, layout, reads=reads, expected=expected)
        return batch, verdict

    def check(self, batch: ForwardBatch, expected: ExpectedRows) -> CanaryVerdict:
        """What is wrong with what the batch reads. Records nothing."""
        layout = row_layout(batch)
        return self._verdict(layout, self._reads(batch, layout, expected), expected)

    def _reads(self, batch: ForwardBatch, layout: RowLayout, expected: ExpectedRows) -> list[RowReads]:
        return [
            row_reads(layout, group, seeds=expected.seeds, page_size=table.page_size)
            for group, table in zip(batch.page_groups, self.tables, strict=True)
        ]

    def _verdict(self, layout: RowLayout, reads: Sequence[RowReads], expected: ExpectedRows) -> CanaryVerdict:
        violations: list[CanaryViolation] = []
        for sub_pool, (read, table) in enumerate(zip(reads, self.tables, strict=True)):
            ends = torch.from_numpy(read.last_slots).to(self._device)
            is_told = (expected.hashes != canary_chain.UNKNOWN) & (ends > 0)
            is_other = (table.hashes[ends] != expected.hashes) & is_told
            wrong = table.first_wrong(read.pages)
            if not bool((wrong < table.page_size).any() | is_other.any()):
                continue
            found = _first_of_rows(read, wrong.cpu().numpy(), table, ends_well=(is_told & ~is_other).cpu().numpy())
            for row in np.flatnonzero(is_other.cpu().numpy()).tolist():
                found.setdefault(row, (int(layout.prefix_lens[row]) - 1, int(read.last_slots[row])))
            violations += [
                _violation(table, sub_pool=sub_pool, row=row, position=position, slot=slot)
                for row, (position, slot) in sorted(found.items())
            ]
        is_bad = np.zeros(len(layout.prefix_lens), bool)
        is_bad[[violation.row for violation in violations]] = True
        return CanaryVerdict(is_bad=is_bad, violations=tuple(violations))

    def _record(
        self, batch: ForwardBatch, layout: RowLayout, *, reads: Sequence[RowReads], expected: ExpectedRows
    ) -> None:
        mix = _mixed(batch.input_ids, batch.positions)
        positions = batch.positions.cpu().numpy()
        has_prefix = torch.from_numpy(layout.prefix_lens > 0).to(self._device)
        for group, table, read in zip(batch.page_groups, self.tables, reads, strict=True):
            ends = torch.from_numpy(read.last_slots).to(self._device)
            # A row whose prefix this sub-pool lists nowhere has the plan's word only.
            unlisted = torch.where(has_prefix, expected.hashes, expected.seeds)
            before = torch.where(ends > 0, table.hashes[ends], unlisted)
            table.record(
                group.out_cache_loc,
                tokens=batch.input_ids,
                positions=batch.positions,
                hashes=self._chained(mix, before, layout),
                spans=page_spans(layout, positions, page_size=table.page_size, device=self._device),
            )

    def _chained(self, mix: Tensor, before: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor]:
        """([num_tokens] hash before each token, [num_tokens] hash after it), from each row's hash `before`."""
        rows = torch.from_numpy(layout.token_rows).to(self._device)
        places = torch.from_numpy(layout.token_places).to(self._device)
        forward, inverse = self._powers.upto(int(layout.query_lens.max(initial=1)))
        sums = (mix * inverse[places]).cumsum(0)
        starts = torch.from_numpy(layout.starts).to(self._device)
        sums = sums - torch.where(starts > 0, sums[starts - 1], 0)[rows]
        after = forward[places] * (before[rows] + sums)
        shifted = torch.roll(after, 1)
        return torch.where(places == 0, before[rows], shifted), after

    def _signed(self, values: Array) -> Tensor:
        return torch.from_numpy(np.array(values).view(np.int64)).to(self._device)


def make_canary(mode: str, translator: IndexTranslator, *, device: torch.device) -> KVCanary | None:
    """The canary that the setting asks for.

    Raises:
        UnsupportedFeature: no such setting; lists those there are.
    """
    if mode not in (OFF, COUNT, REFUSE):
        raise UnsupportedFeature(f"kv_canary is {mode!r}, known: {OFF}, {COUNT}, {REFUSE}", field="kv_canary")
    return None if mode == OFF else KVCanary(translator, is_refusing=mode == REFUSE, device=device)


def log_violations(verdict: CanaryVerdict, *, first_row: int, handles: Array) -> None:
    """Name the first bad rows of a forward whose first row is `first_row` of the plan."""
    for violation in verdict.violations[:_LOGGED]:
        row = first_row + violation.row
        logger.error(
            "a KV slot holds another token than its row",
            extra={
                "row": row,
                "handle": int(handles[row]),
                "position": violation.position,
                "slot": violation.slot,
                "sub_pool": violation.sub_pool,
                "found_token": violation.found_token,
                "found_position": violation.found_position,
                "bad_rows": int(verdict.is_bad.sum()),
            },
        )


class _Powers:
    """Powers of the chain's factor and of its inverse, as far as they were needed so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pair = self._made(1)

    def upto(self, count: int) -> tuple[Tensor, Tensor]:
        """[at least count] int64 each: the powers 1, 2 ..."""
        if len(self._pair[0]) < count:
            self._pair = self._made(2 * count)
        return self._pair

    def _made(self, count: int) -> tuple[Tensor, Tensor]:
        factor, inverse = (
            torch.from_numpy(canary_chain.powers(base, count).view(np.int64)).to(self._device)
            for base in (canary_chain.FACTOR, canary_chain.INVERSE)
        )
        return factor, inverse


def _mixed(tokens: Tensor, positions: Tensor) -> Tensor:
    """[n] int64: `canary_chain.mixed`, bit for bit, in signed numbers that wrap."""
    mix = (tokens.long() + 1) * _wrapped(canary_chain.TOKEN_FACTOR)
    mix += (positions + 1) * _wrapped(canary_chain.POSITION_FACTOR)
    mix ^= (mix >> canary_chain.MIX_SHIFT) & _LOW
    mix *= _wrapped(canary_chain.MIX_FACTOR)
    return mix


def _wrapped(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _first_of_rows(read: RowReads, wrong: Array, table: CanaryTable, *, ends_well: Array) -> dict[int, tuple[int, int]]:
    """(position, slot) of the first slot of each row that is known not to hold what it should.

    `wrong` is [E] of `CanaryTable.first_wrong`, `ends_well` [num_reqs] bool: the plan's word proves a row's end.
    """
    bad = np.flatnonzero(wrong < table.page_size)
    rows, first, counts = np.unique(read.rows[bad], return_index=True, return_counts=True)
    found = {}
    for row, index, count in zip(rows.tolist(), first.tolist(), counts.tolist(), strict=True):
        is_only = count == 1 and bool(ends_well[row])
        found[row] = _exact(read, int(bad[index]), wrong, table, is_only=is_only)
    return found


def _exact(read: RowReads, entry: int, wrong: Array, table: CanaryTable, *, is_only: bool) -> tuple[int, int]:
    """(position, slot) of the first wrong slot, where page `entry` is the first of its row that is not whole.

    `is_only`: no page behind it breaks the chain, up to a last slot that the plan's word proves.
    """
    page, before = int(read.pages.pages[entry]), int(read.pages.previous_pages[entry])
    position, offset = int(read.pages.positions[entry]), int(wrong[entry])
    if offset:
        offset = min(offset, table.first_unchained(page))
    elif before >= 0 and (last := table.first_unchained(before)) < table.page_size:
        # A token over the last one of a page leaves that page whole and cuts off the next.
        return position - table.page_size + last, before * table.page_size + last
    elif before >= 0 and is_only and table.first_unchained(page) >= int(read.pages.needed[entry]):
        # This page and all behind it are the row's own, so the one in front of them is a page of another chain.
        return position - table.page_size, before * table.page_size
    return position + offset, page * table.page_size + offset


def _violation(table: CanaryTable, *, sub_pool: int, row: int, position: int, slot: int) -> CanaryViolation:
    return CanaryViolation(
        row=row,
        position=position,
        slot=slot,
        sub_pool=sub_pool,
        found_token=int(table.tokens[slot]),
        found_position=int(table.positions[slot]),
    )


def _diverted(batch: ForwardBatch, is_bad_token: Array) -> ForwardBatch:
    """The same batch, whose bad tokens write to the sink."""
    bad = torch.from_numpy(is_bad_token).to(batch.input_ids.device)
    return replace(batch, page_groups=tuple(group.diverted(bad) for group in batch.page_groups))
