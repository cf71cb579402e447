"""Graphs of the CPU: the operators of one real run, replayed into the same storages without the model's Python.

A capture runs the work and records each operator with the places of its arguments and results in the arena. A replay
runs the operators again, in order, on the same addresses (`tape_program.py`). Knows nothing of models and buckets.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from worker_svc.device.break_points import InOrder, Marked, Result, copy_result, parts_of, rebuilt
from worker_svc.device.device_graph import CaptureError
from worker_svc.device.tape_arena import TapeArena
from worker_svc.device.tape_operators import (
    REFUSED_METHODS,
    copies,
    makes_nothing_but_space,
    out_variant,
    simpler,
    tensors_of,
    why_not_recorded,
)
from worker_svc.device.tape_program import MarkedCall, RecordedCall, TapeProgram


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tape:
    """A `DeviceGraph`."""

    program: TapeProgram
    num_calls: int
    scratch_operators: frozenset[str]
    """Those of its operators that make a result elsewhere first: torch has no variant that writes where it is told."""

    @torch.inference_mode()
    def replay(self) -> None:
        """See `DeviceGraph.replay`."""
        self.program.run()


class TapeDevice:
    """A `GraphDevice`. One thread at a time."""

    inlines_marked = False

    def __init__(self) -> None:
        self.arena = TapeArena()

    @contextmanager
    def session(self) -> Iterator["TapeSession"]:
        """See `GraphDevice.session`."""
        self.arena.start_session()
        yield TapeSession(self.arena)

    def pool_bytes(self) -> int:
        """See `GraphDevice.pool_bytes`."""
        return self.arena.num_bytes

    def like(self, tensor: Tensor) -> Tensor:
        """See `GraphDevice.like`."""
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    def synchronise(self) -> None:
        """The CPU is never ahead of its caller."""


class TapeSession:
    """A `CaptureSession`."""

    def __init__(self, arena: TapeArena) -> None:
        self._arena = arena

    def begin(self) -> "TapeCapture":
        """See `CaptureSession.begin`."""
        return TapeCapture(self._arena)


class TapeCapture(InOrder):
    """A `GraphCapture`, on from the start. A CPU has no streams: a tape is in the order of the program."""

    def __init__(self, arena: TapeArena) -> None:
        self._recorder = _Recorder(arena)
        self._guard = _HostGuard(self._recorder)
        self._is_on = False
        self._switch_on()

    def marked(self, function: Marked, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> Result:
        """See `GraphCapture.marked`."""
        self._switch_off()
        try:
            made = function(*tensors, **options)
            return self._recorder.keep_marked(partial(function, **options), tensors, made=made)
        finally:
            self._switch_on()

    def end(self) -> Tape:
        """See `GraphCapture.end`."""
        self.abandon()
        if self._recorder.problem is not None:
            raise CaptureError(self._recorder.problem)
        calls = self._recorder.calls
        scratch = frozenset(call.operator.name() for call in calls if isinstance(call, RecordedCall) and call.results)
        return Tape(program=TapeProgram(calls), num_calls=len(calls), scratch_operators=scratch)

    def abandon(self) -> None:
        """See `GraphCapture.abandon`."""
        if self._is_on:
            self._switch_off()

    def _switch_on(self) -> None:
        self._is_on = True
        self._guard.__enter__()
        self._recorder.__enter__()

    def _switch_off(self) -> None:
        self._is_on = False
        self._recorder.__exit__(None, None, None)
        self._guard.__exit__(None, None, None)


class _Recorder(TorchDispatchMode):
    """Runs every operator for real, with its results in the arena, and keeps how to run it again."""

    def __init__(self, arena: TapeArena) -> None:
        super().__init__()
        self._arena = arena
        self.calls: list[RecordedCall | MarkedCall] = []
        self.problem: str | None = None

    def refuse(self, what: str, why: str) -> None:
        """Fail now, and again at the end if the work swallows it."""
        self.problem = f"{what} cannot be captured: it {why}"
        raise CaptureError(self.problem)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch in place of each operator."""
        kwargs = kwargs or {}
        if func._can_decompose():
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        why = why_not_recorded(func, args)
        if why is not None:
            self.refuse(func.name(), why)
        if func._schema.is_mutable:
            self._add(func, args, kwargs)
            return func(*args, **kwargs)
        if func.is_view:
            return func(*args, **kwargs)
        return self._run_into_arena(func, args, kwargs)

    def _run_into_arena(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors_of((args, kwargs))}
        results = list(tensors_of(result))
        if any(tensor.untyped_storage().data_ptr() in known for tensor in results if tensor.numel()):
            return result
        placed = {id(tensor): self._arena.empty(tensor.shape, tensor.stride(), tensor.dtype) for tensor in results}
        for tensor in results:
            placed[id(tensor)].copy_(tensor)
        outs = [placed[id(tensor)] for tensor in results]
        if not makes_nothing_but_space(func):
            self._record(func, args, kwargs, outs=outs)
        return tree_map_only(Tensor, lambda tensor: placed[id(tensor)], result)

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *, outs: list[Tensor]) -> None:
        if copies(func):
            self._add(torch.ops.aten.copy_.default, (outs[0], args[0]), {})
            return
        func, args = simpler(func, args)
        variant = out_variant(func)
        if variant is None:
            self._add(func, args, kwargs, results=outs)
            return
        operator, names = variant
        accepted = {argument.name for argument in operator._schema.arguments}
        kept = {name: value for name, value in kwargs.items() if name in accepted}
        self._add(operator, args, {**kept, **dict(zip(names, outs, strict=True))})

    def _add(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *, results: Sequence[Tensor] = ()
    ) -> None:
        lasting = tree_map_only(Tensor, self._lasting, (args, kwargs, tuple(results)))
        self.calls.append(RecordedCall(operator=func, arguments=lasting[0], keywords=lasting[1], results=lasting[2]))

    def keep_marked(self, function: Marked, tensors: tuple[Tensor, ...], *, made: Result) -> Result:
        """Record a marked call that has just run and given `made`; what the work goes on with."""
        outs = tuple(self._arena.empty(part.shape, part.stride(), part.dtype) for part in parts_of(made))
        result = rebuilt(made, outs)
        copy_result(made, result)
        inputs, kept = tuple(map(self._lasting, tensors)), tuple(map(self._lasting, outs))
        self.calls.append(MarkedCall(function=function, inputs=inputs, result=rebuilt(made, kept)))
        return result

    def _lasting(self, tensor: Tensor) -> Tensor:
        """To hold for the tape's life: in the arena by address only, so that its block is free after the work."""
        kept = self._arena.lasting(tensor)
        return tensor if kept is None else kept


class _HostGuard(TorchFunctionMode):
    """Refuses the ways from tensor to host that are not operators."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch in place of each of its functions."""
        if func in REFUSED_METHODS:
            self._recorder.refuse(getattr(func, "__name__", str(func)), "hands a tensor to the host")
        return func(*args, **(kwargs or {}))
