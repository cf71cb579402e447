"""How many bytes a plan takes, and which rows of a batch fit the plan of one worker.

An upper bound from the table of columns, so that nothing is encoded to be measured. Guards: no plan exceeds what its
worker takes; rows that do not fit take turns, those that were in no plan for longest first, so that every row which
fits a plan of its own goes on.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from protos.wire import columns
from protos.wire.limits import MAX_PLAN_BYTES, MAX_PLAN_MASKS
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.batch import Batch, PlannedRow
from scheduler_svc.core.cost_model import PlanShape
from scheduler_svc.core.events import RequestSpec
from scheduler_svc.core.request_rules import MASK_HEADER_BYTES, KeyedMask, most_rule_bytes

_ENVELOPE = 640
"""Identity, forwards, and the headers of all columns but those of page tables."""
_PAGE_TABLE = 64
"""Headers of one page table."""
_ROW_GROUPS = (columns.ROWS, columns.SAMPLING, columns.PENALTIES, columns.MASKS, columns.LOGPROBS, columns.DELTA)
_ROW = sum(column.dtype.itemsize for group in _ROW_GROUPS for column in group)
"""One element of each column that has one a row; those with more are counted on top."""
_ROW_OF_TABLE = sum(column.dtype.itemsize for column in columns.PAGE_TABLE)
_TOKEN = sum(column.dtype.itemsize for column in columns.TOKENS) + columns.I32.itemsize
"""And the target of its log-probability."""
_PAGE = 4
"""Once in a table, and once more where it is written."""


@dataclass(frozen=True, slots=True)
class PlanSize:
    """Of one worker; made at attach."""

    limit: int
    page_size: int
    num_tables: int
    logits_width: int

    def least(self, tokens: int) -> int:
        """What a plan with one row of a request of so many positions, and one page of them to compute, may take."""
        return self._at_most(PlanShape(self.page_size, tokens), num_rows=1)

    def takes(self, spec: RequestSpec) -> bool:
        """Whether every row of a request fits some plan."""
        rule_bytes = most_rule_bytes(spec, logits_width=self.logits_width)
        return self.least(len(spec.prompt_ids) + spec.max_tokens) + rule_bytes <= self.limit

    def fitted(self, batch: Batch) -> Batch:
        """The batch, without rows and with shorter chunks where it would not fit."""
        if self.at_most(batch) <= self.limit and sum(1 for _ in _ruled(batch.rows())) <= MAX_PLAN_MASKS:
            return batch
        kept = _Filling(self).fill(batch.rows())
        decode = [kept[row.request.handle] for row in batch.decode if row.request.handle in kept]
        return Batch(decode, [kept[row.request.handle] for row in batch.extend if row.request.handle in kept])

    def at_most(self, batch: Batch) -> int:
        """What the plan of a batch may take; equal masks are counted each."""
        rows = batch.rows()
        rule_bytes = sum(_rules_but_mask(row) + self._mask_bytes(_mask_of(row)) for row in _ruled(rows))
        return self._at_most(batch.shape(), num_rows=len(rows)) + rule_bytes

    @property
    def empty(self) -> int:
        """Bytes of a plan without rows."""
        return _ENVELOPE + self.num_tables * _PAGE_TABLE

    def row_bytes(self, row: PlannedRow) -> int:
        """What a row adds, its rules apart."""
        shape = PlanShape(row.seq_len - row.first_position, row.seq_len)
        return self._at_most(shape, num_rows=1) - self.empty

    def _at_most(self, shape: PlanShape, *, num_rows: int) -> int:
        pages = (shape.context + shape.tokens) // self.page_size + 3 * num_rows
        per_row = _ROW + self.num_tables * _ROW_OF_TABLE
        return self.empty + num_rows * per_row + shape.tokens * _TOKEN + self.num_tables * pages * _PAGE

    def _mask_bytes(self, keyed: KeyedMask | None) -> int:
        if keyed is None:
            return 0
        is_bits = keyed.mask.allowed_bits is not None
        return MASK_HEADER_BYTES + (-(-self.logits_width // 8) if is_bits else keyed.num_bytes)

    def mask_bytes(self, keyed: KeyedMask | None, *, known: set[tuple[str, bytes]]) -> int:
        """What a mask adds to a plan that has those `known`."""
        return 0 if keyed is None or keyed.key in known else self._mask_bytes(keyed)


class _Filling:
    """One plan as it is filled."""

    def __init__(self, size: PlanSize) -> None:
        self._size = size
        self._left = size.limit - size.empty
        self._masks: set[tuple[str, bytes]] = set()

    def fill(self, rows: list[PlannedRow]) -> dict[int, PlannedRow]:
        """The rows that fit, by handle, those first that were in no plan for longest."""
        kept: dict[int, PlannedRow] = {}
        for row in sorted(rows, key=lambda row: row.request.standing.planned_seq):
            taken = row if self._takes(row) else self._shortened(row)
            if taken is not None:
                self._add(taken)
                kept[row.request.handle] = taken
        return kept

    def _takes(self, row: PlannedRow) -> bool:
        mask = _mask_of(row)
        has_room = mask is None or mask.key in self._masks or len(self._masks) < MAX_PLAN_MASKS
        return has_room and self._bytes(row) <= self._left

    def _shortened(self, row: PlannedRow) -> PlannedRow | None:
        """A chunk of whole pages that fits; it samples nothing, so that its rules do not travel."""
        size = self._size.page_size
        pages = (row.seq_len - 1) // size - row.first_position // size
        while pages > 0:
            end = (row.first_position // size + pages) * size
            shorter = row._replace(seq_len=end, samples=False)
            over = self._bytes(shorter) - self._left
            if over <= 0:
                return shorter
            pages -= max(1, over // (size * _TOKEN + 2 * self._size.num_tables * _PAGE))
        return None

    def _add(self, row: PlannedRow) -> None:
        self._left -= self._bytes(row)
        mask = _mask_of(row)
        if mask is not None:
            self._masks.add(mask.key)

    def _bytes(self, row: PlannedRow) -> int:
        return (
            self._size.row_bytes(row) + _rules_but_mask(row) + self._size.mask_bytes(_mask_of(row), known=self._masks)
        )


def plan_size(info: WorkerInfo) -> PlanSize:
    """Of a worker."""
    return PlanSize(
        limit=min(info.limits.max_plan_bytes, MAX_PLAN_BYTES),
        page_size=info.sub_pools[0].page_size,
        num_tables=len(info.sub_pools),
        logits_width=info.logits_width,
    )


def _ruled(rows: list[PlannedRow]) -> Iterator[PlannedRow]:
    return (row for row in rows if row.samples and row.request.rules)


def _rules_but_mask(row: PlannedRow) -> int:
    rules = row.request.rules if row.samples else None
    return rules.num_bytes if rules else 0


def _mask_of(row: PlannedRow) -> KeyedMask | None:
    rules = row.request.rules if row.samples else None
    return rules.mask_at(row.seq_len - row.request.prompt_len) if rules else None
