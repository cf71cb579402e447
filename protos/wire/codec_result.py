"""ForwardResult to its protobuf message and back. Public entry points are in `codec`.

Guards: a decoded result is well formed (columns agree in length, CSR tables are consistent, enum values are known), so
the scheduling core can index it without looking.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import TypeVar

import numpy as np

from protos.forwardplane.v1 import plan_pb2
from protos.wire import columns
from protos.wire.codec_plan import identity_from_proto, identity_to_proto
from protos.wire.enums import ForwardMode, GraphPhase, GraphRefusal, RowFailure, RowStatus
from protos.wire.errors import DataFault, InvalidPlan
from protos.wire.plan import GraphChoice
from protos.wire.result import (
    ForwardOutcome,
    ForwardResult,
    PlanRejection,
    PlanTimings,
    ResultColumns,
    ResultHiddenStates,
    ResultLogprobs,
)

EnumT = TypeVar("EnumT", bound=IntEnum)

HIDDEN_ITEM_SIZES = {"float32": 4, "bfloat16": 2}
TIMING_FIELDS = tuple(plan_pb2.PlanTimings.DESCRIPTOR.fields_by_name)

# Read once: walking an enum costs more than checking a column.
_STATUSES = tuple(sorted(RowStatus))
_HIGHEST_FAILURE = max(RowFailure)


def result_to_proto(result: ForwardResult) -> plan_pb2.ForwardResult:
    """The message of `result`."""
    message = plan_pb2.ForwardResult(identity=identity_to_proto(result.identity), plan_digest=result.plan_digest)
    if result.rejection is not None:
        message.rejection.CopyFrom(_rejection_to_proto(result.rejection))
    if result.rows is not None:
        message.rows.num_rows = len(result.rows.handles)
        columns.pack(columns.RESULT_ROWS, result.rows, message=message.rows)
        message.timings.CopyFrom(
            plan_pb2.PlanTimings(**{name: getattr(result.timings, name) for name in TIMING_FIELDS})
        )
    for outcome in result.forwards:
        message.forwards.append(_outcome_to_proto(outcome))
    if result.logprobs is not None:
        message.logprobs.SetInParent()
        columns.pack(columns.RESULT_LOGPROBS, result.logprobs, message=message.logprobs)
    if result.hidden_states is not None:
        message.hidden_states.dtype = result.hidden_states.dtype
        message.hidden_states.hidden_size = result.hidden_states.hidden_size
        columns.pack(columns.RESULT_HIDDEN_STATES, result.hidden_states, message=message.hidden_states)
    return message


def result_from_proto(message: plan_pb2.ForwardResult) -> ForwardResult:
    """The result that `message` holds.

    Raises:
        DataFault: anything about it is malformed.
    """
    try:
        identity = identity_from_proto(message)
    except InvalidPlan as error:
        raise DataFault(error.message, field=error.field) from None
    if message.HasField("rejection") == message.HasField("rows"):
        raise DataFault("a result holds either a rejection or rows", field="rejection", plan_seq=identity.seq)
    if message.HasField("rejection"):
        return ForwardResult(
            identity=identity, rejection=_rejection_from_proto(message.rejection), plan_digest=message.plan_digest
        )
    rows = _rows_from_proto(message.rows)
    num_rows = len(rows.handles)
    return ForwardResult(
        identity=identity,
        rows=rows,
        forwards=tuple(_outcome_from_proto(outcome) for outcome in message.forwards),
        timings=PlanTimings(**{name: getattr(message.timings, name) for name in TIMING_FIELDS}),
        logprobs=_logprobs_from_proto(message.logprobs, num_rows) if message.HasField("logprobs") else None,
        hidden_states=_hidden_from_proto(message.hidden_states, num_rows)
        if message.HasField("hidden_states")
        else None,
        plan_digest=message.plan_digest,
    )


def _rejection_to_proto(rejection: PlanRejection) -> plan_pb2.PlanRejection:
    return plan_pb2.PlanRejection(
        reason=rejection.reason, field=rejection.field, row=rejection.row, message=rejection.message
    )


def _rejection_from_proto(message: plan_pb2.PlanRejection) -> PlanRejection:
    return PlanRejection(
        reason=message.reason,
        field=message.field,
        row=message.row if message.HasField("row") else None,
        message=message.message,
    )


def _outcome_to_proto(outcome: ForwardOutcome) -> plan_pb2.ForwardOutcome:
    message = plan_pb2.ForwardOutcome(
        mode=plan_pb2.ForwardMode.ValueType(outcome.mode),
        real_tokens=outcome.real_tokens,
        padded_tokens=outcome.padded_tokens,
        forward_ns=outcome.forward_ns,
        canary_hits=outcome.canary_hits,
    )
    if isinstance(outcome.graph, GraphChoice):
        message.replayed.phase = plan_pb2.GraphPhase.ValueType(outcome.graph.phase)
        message.replayed.bucket = outcome.graph.bucket
    else:
        message.eager = plan_pb2.GraphRefusal.ValueType(outcome.graph)
    return message


def _outcome_from_proto(message: plan_pb2.ForwardOutcome) -> ForwardOutcome:
    graph: GraphChoice | GraphRefusal
    if message.WhichOneof("graph_outcome") == "replayed":
        phase = _known(GraphPhase, message.replayed.phase, field="forwards.replayed.phase")
        graph = GraphChoice(phase=phase, bucket=message.replayed.bucket)
    else:
        graph = _known(GraphRefusal, message.eager, field="forwards.eager")
    return ForwardOutcome(
        mode=_known(ForwardMode, message.mode, field="forwards.mode"),
        graph=graph,
        real_tokens=message.real_tokens,
        padded_tokens=message.padded_tokens,
        forward_ns=message.forward_ns,
        canary_hits=message.canary_hits,
    )


def _known(kind: type[EnumT], value: int, *, field: str) -> EnumT:
    try:
        return kind(value)
    except ValueError:
        raise DataFault(f"{field} has value {value}, which is not known here", field=field) from None


def _rows_from_proto(message: plan_pb2.ResultColumns) -> ResultColumns:
    arrays = columns.unpack(columns.RESULT_ROWS, message, group="rows", error=DataFault)
    for name, array in arrays.items():
        if array is not None:
            _check_length(f"rows.{name}", array, expected=message.num_rows)
    make: Callable[..., ResultColumns] = ResultColumns
    rows = make(**arrays)
    _check_values("rows.statuses", rows.statuses, low=_STATUSES[0], high=_STATUSES[-1])
    if rows.failures is not None:
        _check_values("rows.failures", rows.failures, low=0, high=_HIGHEST_FAILURE)
    return rows


def _logprobs_from_proto(message: plan_pb2.ResultLogprobs, num_rows: int) -> ResultLogprobs:
    arrays = columns.unpack(columns.RESULT_LOGPROBS, message, group="logprobs", error=DataFault)
    make: Callable[..., ResultLogprobs] = ResultLogprobs
    logprobs = make(**arrays)
    if logprobs.output is not None:
        _check_length("logprobs.output", logprobs.output, expected=num_rows)
    _check_csr(arrays, "output_top_indptr", names=("output_top_ids", "output_top_values"), length=num_rows)
    _check_csr(arrays, "prompt_indptr", names=("prompt",), length=num_rows)
    num_positions = 0 if logprobs.prompt is None else len(logprobs.prompt)
    _check_csr(arrays, "prompt_top_indptr", names=("prompt_top_ids", "prompt_top_values"), length=num_positions)
    return logprobs


def _hidden_from_proto(message: plan_pb2.ResultHiddenStates, num_rows: int) -> ResultHiddenStates:
    arrays = columns.unpack(columns.RESULT_HIDDEN_STATES, message, group="hidden_states", error=DataFault)
    item_size = HIDDEN_ITEM_SIZES.get(message.dtype)
    if item_size is None:
        raise DataFault("hidden_states.dtype is not known here", field="hidden_states.dtype")
    make: Callable[..., ResultHiddenStates] = ResultHiddenStates
    states = make(dtype=message.dtype, hidden_size=message.hidden_size, **arrays)
    _check_indptr("hidden_states.indptr", states.indptr, length=num_rows)
    expected = int(states.indptr[-1]) * message.hidden_size * item_size
    _check_length("hidden_states.states", states.states, expected=expected)
    return states


def _check_csr(arrays: dict[str, np.ndarray | None], indptr_name: str, *, names: tuple[str, ...], length: int) -> None:
    indptr = arrays[indptr_name]
    if indptr is None:
        for name in names:
            if arrays[name] is not None:
                raise DataFault(f"logprobs.{name} is present without {indptr_name}", field=f"logprobs.{name}")
        return
    _check_indptr(f"logprobs.{indptr_name}", indptr, length=length)
    for name in names:
        array = arrays[name]
        assert array is not None, "columns beside a present indptr are never None"
        _check_length(f"logprobs.{name}", array, expected=int(indptr[-1]))


def _check_indptr(field: str, indptr: np.ndarray, *, length: int) -> None:
    _check_length(field, indptr, expected=length + 1)
    if indptr[0] != 0 or (indptr[1:] < indptr[:-1]).any():
        raise DataFault(f"{field} does not rise from 0", field=field)


def _check_length(field: str, array: np.ndarray, *, expected: int) -> None:
    if len(array) != expected:
        raise DataFault(f"{field} has {len(array)} elements, expected {expected}", field=field)


def _check_values(field: str, array: np.ndarray, *, low: int, high: int) -> None:
    bad = np.flatnonzero((array < low) | (array > high))
    if len(bad):
        row = int(bad[0])
        text = f"{field} of row {row} is {int(array[row])}, known are {low} to {high}"
        raise DataFault(text, field=field, rows=(row,))
