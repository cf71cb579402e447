"""Invariants of the plan's frame: identity, rows, lengths, forwards, graph choices, tokens. Part of `validate`."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from protos.wire import columns, limits
from protos.wire.buckets import PHASES, real_units
from protos.wire.checks import check_absent, check_equal, check_length, check_present, check_range, csr_row
from protos.wire.enums import Feature, ForwardMode, HiddenMode
from protos.wire.errors import InvalidPlan, UnsupportedFeature
from protos.wire.plan import Forward, ForwardPlan, GraphChoice
from protos.wire.worker_info import WorkerInfo

INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True)
class ModeRule:
    """What rows a mode may have."""

    max_extend_len: int
    """Most tokens of one row; 0 = the mode has no rows."""


MODE_RULES = MappingProxyType(
    {
        ForwardMode.EXTEND: ModeRule(INT32_MAX),
        ForwardMode.DECODE: ModeRule(1),
        ForwardMode.MIXED: ModeRule(INT32_MAX),
        ForwardMode.IDLE: ModeRule(0),
    }
)
"""Modes of this round. A mode that is not here has no executor, whatever a worker says."""


def check_identity(plan: ForwardPlan, _info: WorkerInfo) -> None:
    """The plan names a life of the worker and a place in the order."""
    identity = plan.identity
    if len(identity.incarnation) != limits.INCARNATION_BYTES:
        text = f"identity.incarnation has {len(identity.incarnation)} bytes, not {limits.INCARNATION_BYTES}"
        raise InvalidPlan(text, field="identity.incarnation")
    if not 1 <= identity.seq <= UINT64_MAX:
        raise InvalidPlan(f"identity.seq is {identity.seq}, the first is 1", field="identity.seq")


def check_counts(plan: ForwardPlan, info: WorkerInfo) -> None:
    """Lists and columns are within the worker's limits and the project's caps."""
    masks = plan.masks.masks if plan.masks is not None else ()
    for field, count, low, high in (
        ("forwards", len(plan.forwards), 1, limits.MAX_PLAN_FORWARDS),
        ("rows", plan.rows.num_rows, 0, min(info.limits.max_rows, limits.MAX_PLAN_ROWS)),
        ("tokens.ids", len(plan.tokens.ids), 0, min(info.limits.max_tokens, limits.MAX_PLAN_TOKENS)),
        ("masks.masks", len(masks), 0, limits.MAX_PLAN_MASKS),
        ("identity.required_features", len(plan.identity.required_features), 0, limits.MAX_REQUIRED_FEATURES),
    ):
        if not low <= count <= high:
            raise InvalidPlan(f"{field} has {count} entries, allowed are {low} to {high}", field=field)


def check_row_columns(plan: ForwardPlan, _info: WorkerInfo) -> None:
    """Every row column has one element a row, flags are flags, and no handle comes twice."""
    rows = plan.rows
    for column in columns.ROWS:
        check_length(f"rows.{column.name}", getattr(rows, column.name), expected=rows.num_rows)
    check_range("rows.samples", rows.samples, low=0, high=1)
    check_range("rows.sample_indices", rows.sample_indices, low=0, high=limits.MAX_SAMPLES - 1)
    check_range("rows.hidden_modes", rows.hidden_modes, low=min(HiddenMode), high=max(HiddenMode))
    if rows.canary_seeds is None:
        check_absent("rows.canary_hashes", rows.canary_hashes, without="rows.canary_seeds")
    order = np.argsort(rows.handles, kind="stable")
    repeated = np.flatnonzero(np.diff(rows.handles[order]) == 0)
    if len(repeated):
        row = int(order[repeated[0] + 1])
        raise InvalidPlan(f"rows.handles of row {row} is also another row's", field="rows.handles", rows=(row,))


def check_lengths(plan: ForwardPlan, info: WorkerInfo) -> None:
    """First position + extend length = sequence length, all within the context, and they add up to the tokens."""
    rows = plan.rows
    context = info.limits.context_tokens
    check_range("rows.extend_lens", rows.extend_lens, low=1, high=INT32_MAX)
    check_range("rows.first_positions", rows.first_positions, low=0, high=INT32_MAX)
    check_range("rows.seq_lens", rows.seq_lens, low=1, high=context)
    check_equal("rows.seq_lens", rows.seq_lens, expected=rows.first_positions.astype(np.int64) + rows.extend_lens)
    check_length("tokens.ids", plan.tokens.ids, expected=int(rows.extend_lens.sum(dtype=np.int64)))


def check_forwards(plan: ForwardPlan, _info: WorkerInfo) -> None:
    """The forwards tile the rows in order, and each row fits its forward's mode."""
    expected = 0
    num_rows = plan.rows.num_rows
    for forward in plan.forwards:
        if forward.row_begin != expected:
            text = f"forwards.row_begin is {forward.row_begin}, expected {expected}"
            raise InvalidPlan(text, field="forwards.row_begin")
        if not forward.row_begin <= forward.row_end <= num_rows:
            text = f"forwards.row_end is {forward.row_end}, allowed are {forward.row_begin} to {num_rows}"
            raise InvalidPlan(text, field="forwards.row_end")
        expected = forward.row_end
        for mode in (forward.mode, forward.logical_mode):
            _check_mode_rows(plan, forward, mode=mode)
    if expected != num_rows:
        raise InvalidPlan(f"forwards end at row {expected}, the plan has {num_rows}", field="forwards.row_end")


def check_graphs(plan: ForwardPlan, info: WorkerInfo) -> None:
    """A named bucket is advertised, of the phase of the forward's mode, and holds the forward."""
    for forward in plan.forwards:
        if isinstance(forward.graph, GraphChoice):
            _check_graph(plan, forward, graph=forward.graph, info=info)


def check_tokens(plan: ForwardPlan, info: WorkerInfo) -> None:
    """Every literal is below the width of the logits; every reference names an earlier plan's row."""
    tokens = plan.tokens
    indptr = token_indptr(plan)
    check_range("tokens.ids", tokens.ids, low=0, high=info.logits_width - 1, indptr=indptr)
    if tokens.sources is None:
        for name, column in _reference_columns(plan):
            check_absent(f"tokens.{name}", column, without="tokens.sources")
        return
    check_length("tokens.sources", tokens.sources, expected=len(tokens.ids))
    check_range("tokens.sources", tokens.sources, low=0, high=1, indptr=indptr)
    referring = np.flatnonzero(tokens.sources)
    for name, column in _reference_columns(plan):
        check_length(f"tokens.{name}", column, expected=len(referring))
    if not len(referring):
        return
    _check_references(plan, info, referring=referring)


def check_delta(plan: ForwardPlan, _info: WorkerInfo) -> None:
    """A delta names an earlier plan by seq and digest, and a base row for each row."""
    delta = plan.delta
    if delta is None:
        return
    if not 1 <= delta.base_seq < plan.identity.seq:
        text = f"delta.base_seq is {delta.base_seq}, allowed are 1 to {plan.identity.seq - 1}"
        raise InvalidPlan(text, field="delta.base_seq")
    if len(delta.base_digest) != limits.DIGEST_BYTES:
        text = f"delta.base_digest has {len(delta.base_digest)} bytes, not {limits.DIGEST_BYTES}"
        raise InvalidPlan(text, field="delta.base_digest")
    check_length("delta.base_rows", delta.base_rows, expected=plan.rows.num_rows)
    check_range("delta.base_rows", delta.base_rows, low=0, high=limits.MAX_PLAN_ROWS)


def token_indptr(plan: ForwardPlan) -> np.ndarray:
    """Where each row's tokens begin, and their number at the end. [R + 1] i64."""
    indptr = np.zeros(plan.rows.num_rows + 1, np.int64)
    np.cumsum(plan.rows.extend_lens, out=indptr[1:])
    return indptr


def _check_mode_rows(plan: ForwardPlan, forward: Forward, *, mode: ForwardMode) -> None:
    rule = MODE_RULES.get(mode)
    if rule is None:
        text = f"forwards.mode is {mode.name}, which has no executor in this release"
        raise UnsupportedFeature(text, field="forwards.mode")
    num_rows = forward.row_end - forward.row_begin
    if (num_rows == 0) != (rule.max_extend_len == 0):
        text = f"a forward of mode {mode.name} has {num_rows} rows"
        raise InvalidPlan(text, field="forwards.row_end", rows=(forward.row_begin,) if num_rows else ())
    lengths = plan.rows.extend_lens[forward.row_begin : forward.row_end]
    if num_rows and int(lengths.max()) > rule.max_extend_len:
        row = forward.row_begin + int(lengths.argmax())
        text = f"rows.extend_lens of row {row} is {int(lengths.max())}, mode {mode.name} allows {rule.max_extend_len}"
        raise InvalidPlan(text, field="rows.extend_lens", rows=(row,))


def _check_graph(plan: ForwardPlan, forward: Forward, *, graph: GraphChoice, info: WorkerInfo) -> None:
    if Feature.GRAPHS not in info.features:
        raise UnsupportedFeature("forwards.graph needs GRAPHS, which this worker lacks", field="forwards.graph")
    if PHASES.get(forward.mode) is not graph.phase:
        text = f"forwards.graph.phase is {graph.phase.name}, mode {forward.mode.name} does not replay it"
        raise InvalidPlan(text, field="forwards.graph.phase")
    advertised = [size for entry in info.buckets if entry.phase is graph.phase for size in entry.sizes]
    if graph.bucket not in advertised:
        text = f"forwards.graph.bucket is {graph.bucket}, which this worker does not advertise"
        raise InvalidPlan(text, field="forwards.graph.bucket")
    lengths = plan.rows.extend_lens[forward.row_begin : forward.row_end]
    real = real_units(graph.phase, num_rows=len(lengths), num_tokens=int(lengths.sum(dtype=np.int64)))
    if real > graph.bucket:
        text = f"forwards.graph.bucket is {graph.bucket}, the forward needs {real}"
        raise InvalidPlan(text, field="forwards.graph.bucket")


def _reference_columns(plan: ForwardPlan) -> Iterator[tuple[str, np.ndarray | None]]:
    for name in ("ref_seqs", "ref_rows", "ref_offsets"):
        yield name, getattr(plan.tokens, name)


def _check_references(plan: ForwardPlan, info: WorkerInfo, *, referring: np.ndarray) -> None:
    tokens = plan.tokens
    seqs = check_present("tokens.ref_seqs", tokens.ref_seqs)
    ref_rows = check_present("tokens.ref_rows", tokens.ref_rows)
    indptr = token_indptr(plan)
    max_row = min(info.limits.max_rows, limits.MAX_PLAN_ROWS) - 1
    for field, values, low, high in (
        ("tokens.ids", tokens.ids[referring], 0, 0),
        ("tokens.ref_seqs", seqs, 1, plan.identity.seq - 1),
        ("tokens.ref_rows", ref_rows, 0, max_row),
    ):
        good = (values >= low) & (values <= high)
        if not good.all():
            index = int(np.argmin(good))
            row = csr_row(indptr, int(referring[index]))
            text = f"{field} of a reference of row {row} is {values[index].item()}, allowed are {low} to {high}"
            raise InvalidPlan(text, field=field, rows=(row,))
