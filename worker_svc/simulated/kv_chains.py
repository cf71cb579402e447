"""The simulated KV pool: each slot holds the chain of all tokens up to its own, as its writer saw them.

Written and read through a plan's page table, so a wrong page, a wrong order or a slot that was never written is another
chain and therefore another token. Guards: nothing is kept but what slots hold; page 0 is never read.
"""

from dataclasses import dataclass

import numpy as np

from protos.wire.plan import ForwardPlan, PageTable
from protos.wire.simulated_tokens import mixed, token_tags
from worker_svc.batch.positions import extend_positions, start_offsets, token_rows

Array = np.ndarray

_UNWRITTEN = np.uint64(0xA24BAED4963EE407)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """Size of the pool; `num_pages` counts the sink."""

    num_pages: int
    page_size: int


class ChainPool:
    """Made once at start, used by the device thread."""

    def __init__(self, shape: PoolShape, *, checks_pages: bool) -> None:
        """Fill every slot with a chain that no sequence has.

        Args:
            shape: size.
            checks_pages: look at every page of a row, not only at the slot before its new tokens.
        """
        self._shape = shape
        self._checks_pages = checks_pages
        num_slots = shape.num_pages * shape.page_size
        self._chains = mixed(np.arange(num_slots, dtype=np.uint64) ^ _UNWRITTEN)
        last = self._chains[shape.page_size - 1 :: shape.page_size]
        self._edges = np.stack((mixed(self._chains[:: shape.page_size]), last), axis=1)
        """[num_pages, 2]: the chain before a page's first slot, as its writer saw it, and that of its last slot."""

    def advance(self, plan: ForwardPlan, token_ids: Array, *, failed: Array) -> Array:
        """Write the plan's tokens; each row's chain at its last token. [num_rows] uint64.

        Args:
            plan: whose first page table is used.
            token_ids: all literal. [num_tokens]
            failed: rows that write nothing; their chains mean nothing. [num_rows] bool
        """
        rows, table = plan.rows, plan.page_tables[0]
        if not rows.num_rows:
            return np.zeros(0, np.uint64)
        owners = token_rows(rows.extend_lens)
        positions = extend_positions(rows.first_positions, rows.extend_lens)
        slots = self._slots(table, owners, positions)
        before = self._chains_before(table, rows.first_positions)
        if self._checks_pages:
            before = before ^ self._faults(table, rows.first_positions)
        sums = np.cumsum(token_tags(token_ids, positions), dtype=np.uint64)
        firsts = start_offsets(rows.extend_lens)
        offsets = np.where(firsts > 0, sums[firsts - 1], np.uint64(0))
        chains = sums + (before - offsets)[owners]
        previous = np.empty_like(chains)
        previous[1:] = chains[:-1]
        previous[firsts] = before
        self._write(slots, chains, previous=previous, written=~failed[owners])
        last: Array = chains[firsts + rows.extend_lens - 1]
        return last

    def _slots(self, table: PageTable, owners: Array, positions: Array) -> Array:
        """Where each token lies. [num_tokens] int64."""
        page_size = self._shape.page_size
        index, offset = np.divmod(positions, page_size)
        slots: Array = table.indices[table.indptr[owners] + index].astype(np.int64) * page_size + offset
        return slots

    def _chains_before(self, table: PageTable, first_positions: Array) -> Array:
        """[num_rows] uint64: of the slot before each row's new tokens; 0 where a sequence begins."""
        last = np.maximum(first_positions.astype(np.int64) - 1, 0)
        slots = self._slots(table, np.arange(len(last)), last)
        return np.where(first_positions > 0, self._chains[slots], np.uint64(0))

    def _faults(self, table: PageTable, first_positions: Array) -> Array:
        """[num_rows] uint64: 0 where each page goes on where the one before it ended, else a word of its own."""
        edges = self._edges[table.indices]
        is_wrong = np.empty(len(edges), bool)
        np.not_equal(edges[1:, 0], edges[:-1, 1], out=is_wrong[1:])
        firsts = table.indptr[:-1]
        is_wrong[firsts] = edges[firsts, 0] != 0
        faults = np.zeros(len(first_positions), np.uint64)
        places = np.flatnonzero(is_wrong)
        if not len(places):
            return faults
        rows = np.searchsorted(table.indptr, places, side="right") - 1
        held_pages = -(-first_positions.astype(np.int64) // self._shape.page_size)
        is_held = places - table.indptr[rows] < held_pages[rows]
        places, rows = places[is_held], rows[is_held]
        np.bitwise_xor.at(faults, rows, mixed(edges[places, 0] ^ mixed(places.astype(np.uint64))))
        return faults

    def _write(self, slots: Array, chains: Array, *, previous: Array, written: Array) -> None:
        if not written.all():
            slots, chains, previous = slots[written], chains[written], previous[written]
        self._chains[slots] = chains
        pages, offsets = np.divmod(slots, self._shape.page_size)
        is_first, is_last = offsets == 0, offsets == self._shape.page_size - 1
        self._edges[pages[is_first], 0] = previous[is_first]
        self._edges[pages[is_last], 1] = chains[is_last]
