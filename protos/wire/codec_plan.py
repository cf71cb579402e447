"""ForwardPlan to its protobuf message and back. Public entry points are in `codec`.

Knows the message's shape, not what a plan means: that is `validate`. Guards: whatever the bytes are, decoding raises
only errors of the taxonomy, and caps on lists are checked before they are walked.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np

from protos.forwardplane.v1 import plan_pb2
from protos.wire import columns, limits
from protos.wire.enums import ForwardMode, GraphPhase, GraphRefusal
from protos.wire.errors import InvalidPlan, UnsupportedFeature
from protos.wire.plan import (
    Forward,
    ForwardPlan,
    GraphChoice,
    LogprobColumns,
    Mask,
    MaskColumns,
    PageOperations,
    PageTable,
    PenaltyColumns,
    PlanDelta,
    PlanIdentity,
    RowColumns,
    SamplingColumns,
    TokenColumns,
    WriteWindow,
)

EnumT = TypeVar("EnumT", bound=IntEnum)
GroupT = TypeVar("GroupT")

RESERVED_GROUPS = ("parallel", "speculation", "adapters", "recurrent", "transfer", "block_diffusion")
OPTIONAL_GROUPS: tuple[tuple[str, tuple[columns.Column, ...], Callable[..., Any]], ...] = (
    ("page_operations", columns.PAGE_OPERATIONS, PageOperations),
    ("sampling", columns.SAMPLING, SamplingColumns),
    ("penalties", columns.PENALTIES, PenaltyColumns),
    ("logprobs", columns.LOGPROBS, LogprobColumns),
)
"""Groups that hold nothing but columns: field name, columns, frozen type."""


def plan_to_proto(plan: ForwardPlan) -> plan_pb2.ForwardPlan:
    """The message of `plan`. Reserved groups have no frozen form and cannot be written: asserted."""
    assert not plan.reserved, f"no frozen form of {plan.reserved}"
    message = plan_pb2.ForwardPlan(identity=identity_to_proto(plan.identity))
    for forward in plan.forwards:
        message.forwards.append(_forward_to_proto(forward))
    message.rows.num_rows = plan.rows.num_rows
    columns.pack(columns.ROWS, plan.rows, message=message.rows)
    message.tokens.SetInParent()
    columns.pack(columns.TOKENS, plan.tokens, message=message.tokens)
    for table in plan.page_tables:
        columns.pack(columns.PAGE_TABLE, table, message=message.page_tables.add(sub_pool=table.sub_pool))
    for name, group_columns, _ in OPTIONAL_GROUPS:
        group = getattr(plan, name)
        if group is not None:
            target = getattr(message, name)
            target.SetInParent()
            columns.pack(group_columns, group, message=target)
    if plan.masks is not None:
        _masks_to_proto(plan.masks, message.masks)
    if plan.delta is not None:
        message.delta.base_seq = plan.delta.base_seq
        message.delta.base_digest = plan.delta.base_digest
        message.delta.digest = plan.delta.digest
        columns.pack(columns.DELTA, plan.delta, message=message.delta)
    return message


def plan_from_proto(message: plan_pb2.ForwardPlan) -> ForwardPlan:
    """The plan that `message` holds; its arrays are read-only views.

    Raises:
        InvalidPlan: a column, list or choice is malformed.
        UnsupportedFeature: an enum value this release does not know.
    """
    identity = identity_from_proto(message)
    for name, count, cap in (
        ("forwards", len(message.forwards), limits.MAX_PLAN_FORWARDS),
        ("page_tables", len(message.page_tables), limits.MAX_SUB_POOLS),
        ("masks.masks", len(message.masks.masks), limits.MAX_PLAN_MASKS),
    ):
        if count > cap:
            raise InvalidPlan(f"{name} has {count} entries, the limit is {cap}", field=name, plan_seq=identity.seq)
    present = {field.name for field, _ in message.ListFields()}
    groups = {
        name: _group(message, name, group_columns=group_columns, make=make)
        for name, group_columns, make in OPTIONAL_GROUPS
        if name in present
    }
    return ForwardPlan(
        identity=identity,
        forwards=tuple(_forward_from_proto(forward) for forward in message.forwards),
        rows=_rows_from_proto(message),
        tokens=_tokens_from_proto(message),
        page_tables=tuple(_page_table_from_proto(table) for table in message.page_tables),
        masks=_masks_from_proto(message.masks) if message.HasField("masks") else None,
        delta=_delta_from_proto(message.delta) if message.HasField("delta") else None,
        reserved=tuple(name for name in RESERVED_GROUPS if name in present),
        **groups,
    )


def identity_to_proto(identity: PlanIdentity) -> plan_pb2.PlanIdentity:
    """The message of `identity`."""
    return plan_pb2.PlanIdentity(
        epoch=identity.epoch,
        term=identity.term,
        seq=identity.seq,
        incarnation=identity.incarnation,
        budget_ms=identity.budget_ms,
        traceparent=identity.traceparent,
        required_features=identity.required_features,
    )


def identity_from_proto(message: plan_pb2.ForwardPlan | plan_pb2.ForwardResult) -> PlanIdentity:
    """The identity of a plan or result.

    Raises:
        InvalidPlan: it is absent, or its incarnation, seq or list lengths are out of range.
    """
    identity = message.identity
    if len(identity.incarnation) != limits.INCARNATION_BYTES:
        text = f"identity.incarnation has {len(identity.incarnation)} bytes, not {limits.INCARNATION_BYTES}"
        raise InvalidPlan(text, field="identity.incarnation")
    if identity.seq < 1:
        raise InvalidPlan("identity.seq is 0, the first is 1", field="identity.seq")
    for name, size, cap in (
        ("traceparent", len(identity.traceparent), limits.MAX_TRACEPARENT_BYTES),
        ("required_features", len(identity.required_features), limits.MAX_REQUIRED_FEATURES),
    ):
        if size > cap:
            field = f"identity.{name}"
            raise InvalidPlan(f"{field} has length {size}, the limit is {cap}", field=field, plan_seq=identity.seq)
    return PlanIdentity(
        epoch=identity.epoch,
        term=identity.term,
        seq=identity.seq,
        incarnation=identity.incarnation,
        budget_ms=identity.budget_ms,
        traceparent=identity.traceparent,
        required_features=tuple(identity.required_features),
    )


def known_enum(kind: type[EnumT], value: int, *, field: str) -> EnumT:
    """The member of `kind` with number `value`.

    Raises:
        InvalidPlan: 0, the sender did not say.
        UnsupportedFeature: a number of a later release.
    """
    if value == 0:
        raise InvalidPlan(f"{field} is not given", field=field)
    try:
        return kind(value)
    except ValueError:
        raise UnsupportedFeature(f"{field} has value {value}, which is not known here", field=field) from None


def _forward_to_proto(forward: Forward) -> plan_pb2.Forward:
    begin, end = forward.layers or (0, 0)
    message = plan_pb2.Forward(
        mode=plan_pb2.ForwardMode.ValueType(forward.mode),
        logical_mode=plan_pb2.ForwardMode.ValueType(forward.logical_mode),
        row_begin=forward.row_begin,
        row_end=forward.row_end,
        layer_begin=begin,
        layer_end=end,
    )
    if isinstance(forward.graph, GraphChoice):
        message.graph.phase = plan_pb2.GraphPhase.ValueType(forward.graph.phase)
        message.graph.bucket = forward.graph.bucket
    else:
        message.eager = plan_pb2.GraphRefusal.ValueType(forward.graph)
    window = forward.write_window
    if window is not None:
        for name in ("columns", "run"):
            span = getattr(window, name)
            if span is not None:
                target = getattr(message.write_window, name)
                target.SetInParent()
                target.begin, target.end = span
        if window.flat_index is not None:
            message.write_window.flat_index = columns.array_bytes(columns.WRITE_WINDOW[0], window.flat_index)
    return message


def _forward_from_proto(message: plan_pb2.Forward) -> Forward:
    choice = message.WhichOneof("graph_choice")
    graph: GraphChoice | GraphRefusal
    if choice == "graph":
        phase = known_enum(GraphPhase, message.graph.phase, field="forwards.graph.phase")
        graph = GraphChoice(phase=phase, bucket=message.graph.bucket)
    elif choice == "eager":
        graph = known_enum(GraphRefusal, message.eager, field="forwards.eager")
    else:
        raise InvalidPlan("forwards.graph_choice is not given", field="forwards.graph_choice")
    layers = (message.layer_begin, message.layer_end)
    return Forward(
        mode=known_enum(ForwardMode, message.mode, field="forwards.mode"),
        logical_mode=known_enum(ForwardMode, message.logical_mode, field="forwards.logical_mode"),
        row_begin=message.row_begin,
        row_end=message.row_end,
        graph=graph,
        write_window=_window_from_proto(message.write_window) if message.HasField("write_window") else None,
        layers=layers if any(layers) else None,
    )


def _window_from_proto(message: plan_pb2.WriteWindow) -> WriteWindow:
    name = message.WhichOneof("window")
    if name == "columns":
        return WriteWindow(columns=(message.columns.begin, message.columns.end))
    if name == "run":
        return WriteWindow(run=(message.run.begin, message.run.end))
    if name == "flat_index":
        group = "forwards.write_window"
        return WriteWindow(
            flat_index=columns.view(columns.WRITE_WINDOW[0], message.flat_index, group=group, error=InvalidPlan)
        )
    raise InvalidPlan("forwards.write_window is empty", field="forwards.write_window")


def _group(
    message: Any, name: str, *, group_columns: tuple[columns.Column, ...], make: Callable[..., GroupT]
) -> GroupT:
    return make(**columns.unpack(group_columns, getattr(message, name), group=name, error=InvalidPlan))


def _rows_from_proto(message: plan_pb2.ForwardPlan) -> RowColumns:
    if not message.HasField("rows"):
        raise InvalidPlan("rows is absent", field="rows")
    rows = _group(message, "rows", group_columns=columns.ROWS, make=RowColumns)
    if rows.num_rows != message.rows.num_rows:
        text = f"rows.handles has {rows.num_rows} elements, rows.num_rows says {message.rows.num_rows}"
        raise InvalidPlan(text, field="rows.handles")
    return rows


def _tokens_from_proto(message: plan_pb2.ForwardPlan) -> TokenColumns:
    if not message.HasField("tokens"):
        raise InvalidPlan("tokens is absent", field="tokens")
    return _group(message, "tokens", group_columns=columns.TOKENS, make=TokenColumns)


def _page_table_from_proto(message: plan_pb2.PageTable) -> PageTable:
    arrays = columns.unpack(columns.PAGE_TABLE, message, group="page_tables", error=InvalidPlan)
    make: Callable[..., PageTable] = PageTable
    return make(sub_pool=message.sub_pool, **arrays)


def _masks_to_proto(masks: MaskColumns, message: plan_pb2.MaskColumns) -> None:
    message.SetInParent()
    columns.pack(columns.MASKS, masks, message=message)
    for mask in masks.masks:
        target = message.masks.add()
        for column in columns.MASK:
            array = getattr(mask, column.name)
            if array is not None:
                setattr(target, column.name, columns.array_bytes(column, array))


def _masks_from_proto(message: plan_pb2.MaskColumns) -> MaskColumns:
    arrays = columns.unpack(columns.MASKS, message, group="masks", error=InvalidPlan)
    make: Callable[..., MaskColumns] = MaskColumns
    return make(masks=tuple(_mask_from_proto(mask) for mask in message.masks), **arrays)


def _mask_from_proto(message: plan_pb2.Mask) -> Mask:
    name = message.WhichOneof("mask")
    arrays: dict[str, np.ndarray] = {
        column.name: columns.view(column, getattr(message, column.name), group="masks.masks", error=InvalidPlan)
        for column in columns.MASK
        if column.name == name
    }
    if not arrays:
        raise InvalidPlan("masks.masks has an entry without a mask", field="masks.masks")
    return Mask(**arrays)


def _delta_from_proto(message: plan_pb2.PlanDelta) -> PlanDelta:
    arrays = columns.unpack(columns.DELTA, message, group="delta", error=InvalidPlan)
    make: Callable[..., PlanDelta] = PlanDelta
    return make(base_seq=message.base_seq, base_digest=message.base_digest, digest=message.digest, **arrays)
