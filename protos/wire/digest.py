"""The digest that names a plan: over its decoded columns, not over its bytes.

Guards: equal content gives an equal digest whatever encoder wrote it; a column that is empty counts as absent.
"""

import hashlib
import struct

import numpy as np

from protos.wire import columns, limits
from protos.wire.codec_plan import OPTIONAL_GROUPS
from protos.wire.plan import Forward, ForwardPlan, GraphChoice, Mask, PlanIdentity

_COPIED_BYTES = 4096
"""Below this, one call more costs more than a copy."""


class _Hasher:
    """Feeds named, length-prefixed parts to the hash, so that no two contents run together."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=limits.DIGEST_BYTES)

    def name(self, text: str) -> None:
        self._hash.update(_prefixed(text))

    def numbers(self, name: str, *values: int) -> None:
        self.name(name)
        self._hash.update(struct.pack(f"<I{len(values)}q", len(values), *(_signed(value) for value in values)))

    def content(self, name: str, content: bytes) -> None:
        self._hash.update(_head(name, len(content)))
        self._hash.update(content)

    def array(self, name: str, array: np.ndarray) -> None:
        head = _head(name, array.nbytes)
        if array.nbytes < _COPIED_BYTES:
            self._hash.update(head + array.tobytes())
        else:
            self._hash.update(head)
            self._hash.update(np.ascontiguousarray(array).data)

    def group(self, name: str, group_columns: tuple[columns.Column, ...], *, source: object) -> None:
        self.name(name)
        for column in group_columns:
            array = getattr(source, column.name)
            if array is not None and len(array):
                self.array(column.name, array)

    def digest(self) -> bytes:
        return self._hash.digest()


def plan_digest(plan: ForwardPlan) -> bytes:
    """16 bytes that name the plan's content. The identity's time budget and trace context do not count."""
    hasher = _Hasher()
    _add_identity(hasher, plan.identity)
    for forward in plan.forwards:
        _add_forward(hasher, forward)
    hasher.group("rows", columns.ROWS, source=plan.rows)
    hasher.group("tokens", columns.TOKENS, source=plan.tokens)
    for table in plan.page_tables:
        hasher.numbers("page_table", table.sub_pool)
        hasher.group("page_table", columns.PAGE_TABLE, source=table)
    for name, group_columns, _ in OPTIONAL_GROUPS:
        group = getattr(plan, name)
        if group is not None:
            hasher.group(name, group_columns, source=group)
    if plan.masks is not None:
        hasher.group("masks", columns.MASKS, source=plan.masks)
        for mask in plan.masks.masks:
            _add_mask(hasher, mask)
    if plan.delta is not None:
        hasher.numbers("delta", plan.delta.base_seq)
        hasher.content("base_digest", plan.delta.base_digest)
        hasher.content("whole", plan.delta.digest)
        hasher.group("delta", columns.DELTA, source=plan.delta)
    for name in plan.reserved:
        hasher.name(name)
    return hasher.digest()


def _add_identity(hasher: _Hasher, identity: PlanIdentity) -> None:
    hasher.numbers("identity", identity.epoch, identity.term, identity.seq)
    hasher.content("incarnation", identity.incarnation)
    hasher.numbers("required_features", *identity.required_features)


def _add_forward(hasher: _Hasher, forward: Forward) -> None:
    hasher.numbers("forward", forward.mode, forward.logical_mode, forward.row_begin, forward.row_end)
    hasher.numbers("layers", *(forward.layers or (0, 0)))
    if isinstance(forward.graph, GraphChoice):
        hasher.numbers("graph", forward.graph.phase, forward.graph.bucket)
    else:
        hasher.numbers("eager", forward.graph)
    window = forward.write_window
    if window is None:
        return
    for name in ("columns", "run"):
        span = getattr(window, name)
        if span is not None:
            hasher.numbers(f"write_{name}", *span)
    if window.flat_index is not None:
        hasher.array("write_flat_index", window.flat_index)


def _add_mask(hasher: _Hasher, mask: Mask) -> None:
    for column in columns.MASK:
        array = getattr(mask, column.name)
        if array is not None:
            hasher.array(column.name, array)


def _head(name: str, size: int) -> bytes:
    """What stands in front of `size` bytes of content."""
    return _prefixed(name) + struct.pack("<Q", size)


def _prefixed(text: str) -> bytes:
    return struct.pack("<I", len(text)) + text.encode()


def _signed(value: int) -> int:
    """A 64-bit unsigned number as the signed one of the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
