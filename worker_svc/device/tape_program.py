"""Recorded operator calls as one program that torch's interpreter runs, so that no Python stands between two operators.

A call through Python costs two to four microseconds, one of the interpreter a quarter of that; a decode step of a small
model has over a thousand. The program is run as it is written: every optimisation of the interpreter is off, because a
fused operator has other bits. Knows nothing of captures.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from worker_svc.device.break_points import Marked, Result, copy_result
from worker_svc.device.device_graph import CaptureError

_OPTIONAL_TENSORS = torch._C.ListType(torch._C.OptionalType(torch._C.TensorType.get()))
_NAMESPACE = "forwardplane_tape"
_TENSORS = torch._C.ListType(torch._C.TensorType.get())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedCall:
    """One operator, with tensors that live as long as the program."""

    operator: OpOverload
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[Tensor, ...] = ()
    """Where to copy what it returns. Empty if it writes in place."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MarkedCall:
    """A call into Python on tensors that live as long as the program."""

    function: Marked
    inputs: tuple[Tensor, ...]
    result: Result
    """Where to copy what it returns."""


class TapeProgram:
    """Runs its calls in order. Holds every tensor it uses."""

    def __init__(self, calls: Sequence[RecordedCall | MarkedCall]) -> None:
        """Compile.

        Raises:
            CaptureError: torch's interpreter does not know an operator or an argument.
        """
        marked = [call for call in calls if isinstance(call, MarkedCall)]
        self._library = torch.library.Library(_NAMESPACE, "FRAGMENT")
        name = f"marked_{id(self):x}"
        if marked:
            # It says that it writes a tensor, so that the interpreter keeps it, and its place.
            self._library.define(f"{name}(Tensor(a!) written, int index) -> ()")
            self._library.impl(name, partial(_call_marked, marked), "CompositeExplicitAutograd")
            weakref.finalize(self, marked.clear)  # torch keeps what was registered
        writer = _Writer(marked=f"{_NAMESPACE}::{name}")
        for call in calls:
            writer.add_any(call)
        self._tensors = writer.tensors
        self._function = writer.function()

    def run(self) -> None:
        """Once, on whatever the tensors hold. Without the interpreter lock."""
        torch._C._set_graph_executor_optimize(False)  # a setting of this thread
        self._function(*self._tensors)


def _call_marked(calls: Sequence[MarkedCall], written: Tensor, index: int) -> None:  # noqa: ARG001 - the schema's
    call = calls[index]
    copy_result(call.function(*call.inputs), call.result)


class _Writer:
    """Builds the interpreter's graph."""

    def __init__(self, *, marked: str) -> None:
        self._graph = torch._C.Graph()
        self._marked = marked
        self._num_marked = 0
        self._written = torch.zeros(1)
        self._values: dict[int, torch._C.Value] = {}
        self._beside: list[Tensor] = []
        self.tensors: list[Tensor] = []

    def add_any(self, call: RecordedCall | MarkedCall) -> None:
        """Append a call."""
        if isinstance(call, MarkedCall):
            self._append(self._marked, [self._tensor(self._written), self._value(self._num_marked)], num_outputs=0)
            self._num_marked += 1
            return
        try:
            self._add(call)
        except RuntimeError as error:
            raise CaptureError(f"{call.operator.name()} cannot be captured: {error}") from error

    def _add(self, call: RecordedCall) -> None:
        schema = call.operator._schema
        self._beside = [argument for argument in call.arguments if isinstance(argument, Tensor)]
        given = dict(zip((argument.name for argument in schema.arguments), call.arguments, strict=False))
        given |= call.keywords
        inputs = [
            self._value(given.get(argument.name, argument.default_value), kind=str(argument.type))
            for argument in schema.arguments
        ]
        outputs = self._append(schema.name, inputs, num_outputs=len(schema.returns))
        for result, output in zip(call.results, outputs, strict=bool(call.results)):
            self._append("aten::copy_", [self._value(result), output, self._value(False)], num_outputs=1)

    def function(self) -> Any:
        """Callable with `tensors`."""
        self._graph.registerOutput(self._constant(None))
        self._graph.lint()
        return torch._C._create_function_from_graph("tape", self._graph)

    def _append(self, kind: str, inputs: Sequence[torch._C.Value], *, num_outputs: int) -> list[torch._C.Value]:
        node = self._graph.create(kind, list(inputs), num_outputs)
        self._graph.appendNode(node)
        return list(node.outputs())

    def _value(self, given: Any, *, kind: str = "") -> torch._C.Value:
        if isinstance(given, Tensor):
            return self._tensor(given)
        if kind == "Tensor" and isinstance(given, (bool, int, float)):
            return self._tensor(_number(given, beside=self._beside))
        if isinstance(given, (list, tuple)) and any(isinstance(part, Tensor) for part in given):
            node = self._graph.create("prim::ListConstruct", [self._value(part) for part in given], 1)
            self._graph.appendNode(node)
            node.output().setType(_OPTIONAL_TENSORS if "Optional" in kind else _TENSORS)
            return node.output()
        return self._constant(list(given) if isinstance(given, tuple) else given)

    def _constant(self, given: Any) -> torch._C.Value:
        return self._graph.insertConstant(given)  # type: ignore[attr-defined]  # torch's stubs lack it

    def _tensor(self, tensor: Tensor) -> torch._C.Value:
        if id(tensor) not in self._values:
            self._values[id(tensor)] = self._graph.addInput()
            self.tensors.append(tensor)
        return self._values[id(tensor)]


def _number(given: bool | int | float, *, beside: Sequence[Tensor]) -> Tensor:  # noqa: FBT001 - a value, not a switch
    """A number where the operator takes a tensor, with the bits and the type promotion that torch gives it.

    Without this the interpreter finds another overload, one that makes a storage of its own.
    """
    if isinstance(given, float) and not any(tensor.dtype.is_floating_point for tensor in beside):
        return torch.scalar_tensor(given, dtype=torch.get_default_dtype())
    kinds = {bool: torch.bool, int: torch.int64, float: torch.float64}
    return torch.scalar_tensor(given, dtype=kinds[type(given)])
