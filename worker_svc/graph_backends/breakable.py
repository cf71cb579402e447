"""Graphs with breaks: segment, marked call, segment. Marked calls run eagerly at each replay, the rest is replayed.

A marked call ends the segment. Its tensors are copied into kept tensors at the segment's end, it runs on those, and its
result is copied into a kept tensor that the next segment reads. Inputs are shared by all breaks: nobody reads them
after the call. Each break has a result of its own: later segments may still read it. A marked call inside a marked
call is part of it. Guards: what a marked call returns at a replay has the structure, shapes and dtypes of the capture.
"""

from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from worker_svc.device.break_points import BreakPoints, InOrder, Marked, Result, copy_result, parts_of, rebuilt
from worker_svc.device.device_graph import CaptureSession, DeviceGraph, GraphCapture, GraphDevice
from worker_svc.graph_backends.base import KeyedBackend, Outputs, Pause, Work, no_pause
from worker_svc.graph_backends.kept_tensors import KeptTensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EagerCall:
    """One break: what runs, on which kept tensors, and where its result goes."""

    function: Marked
    inputs: tuple[Tensor, ...]
    options: dict[str, Any]
    result: Result

    def replay(self) -> None:
        """Run it on what the kept inputs hold now.

        Raises:
            InternalFault: its result is unlike the captured one.
        """
        copy_result(self.function(*self.inputs, **self.options), self.result)


@dataclass(frozen=True, slots=True)
class _Captured:
    pieces: tuple[DeviceGraph | EagerCall, ...]
    outputs: Outputs


class BreakableBackend(KeyedBackend[_Captured]):
    """A `GraphBackend`."""

    name = "breakable"

    def __init__(self, device: GraphDevice, *, kept: KeptTensors, breaks: BreakPoints) -> None:
        super().__init__()
        self._device = device
        self._kept = kept
        self._breaks = breaks

    def capture(self, key: Hashable, work: Work, *, pause: Pause = no_pause) -> Outputs:
        """See `GraphBackend.capture`. Pauses after each segment too."""
        with self._breaks.handled_by(_WarmUp(self._kept, self._breaks)):
            for index, made in enumerate(work()):
                self._kept.reserve(made, place=("output", index))
        self._device.synchronise()
        pause()
        with self._device.session() as session:
            recorder = _Recorder(session, self._kept, breaks=self._breaks, pause=pause)
            try:
                with self._breaks.handled_by(recorder):
                    results = work()
                recorder.join()
                outputs = tuple(self._kept.copy(part, place=("output", index)) for index, part in enumerate(results))
                pieces = recorder.end()
            finally:
                recorder.abandon()
        self._captured[key] = _Captured(pieces, outputs)
        return outputs

    def replay(self, key: Hashable) -> Outputs:
        """See `GraphBackend.replay`."""
        captured = self._captured[key]
        with self._breaks.straight():
            for piece in captured.pieces:
                piece.replay()
        return captured.outputs

    def num_pieces(self, key: Hashable) -> int:
        """Segments and marked calls of a captured key."""
        return len(self._captured[key].pieces)


class _WarmUp(InOrder):
    """Runs marked calls as they are and reserves the kept tensors that the capture will need."""

    def __init__(self, kept: KeptTensors, breaks: BreakPoints) -> None:
        self._kept = kept
        self._breaks = breaks
        self._num_breaks = 0

    def marked(self, function: Marked, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> Result:
        """See `BreakPolicy.marked`."""
        for index, tensor in enumerate(tensors):
            self._kept.reserve(tensor, place=("input", index))
        with self._breaks.straight():
            result = function(*tensors, **options)
        for index, part in enumerate(parts_of(result)):
            self._kept.reserve(part, place=("result", self._num_breaks, index))
        self._num_breaks += 1
        return result


class _Recorder:
    """Records segments and marked calls in turn."""

    def __init__(self, session: CaptureSession, kept: KeptTensors, *, breaks: BreakPoints, pause: Pause) -> None:
        self._session = session
        self._kept = kept
        self._breaks = breaks
        self._pause = pause
        self._pieces: list[DeviceGraph | EagerCall] = []
        self._num_breaks = 0
        self._segment: GraphCapture = session.begin()

    def marked(self, function: Marked, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> Result:
        """See `BreakPolicy.marked`."""
        self.join()
        inputs = tuple(self._kept.copy(tensor, place=("input", index)) for index, tensor in enumerate(tensors))
        self._pieces.append(self._segment.end())
        with self._breaks.straight():
            made = function(*inputs, **options)
            keep = partial(self._kept_part, self._num_breaks)
            result = rebuilt(made, tuple(keep(index, part) for index, part in enumerate(parts_of(made))))
            self._pause()
        self._pieces.append(EagerCall(function=function, inputs=inputs, options=options, result=result))
        self._num_breaks += 1
        self._segment = self._session.begin()
        return result

    def beside(self) -> AbstractContextManager[None]:
        """See `BreakPolicy.beside`: within the segment."""
        return self._segment.beside()

    def join(self) -> None:
        """See `BreakPolicy.join`."""
        self._segment.join()

    def end(self) -> tuple[DeviceGraph | EagerCall, ...]:
        """All pieces, in order."""
        return (*self._pieces, self._segment.end())

    def abandon(self) -> None:
        """See `GraphCapture.abandon`."""
        self._segment.abandon()

    def _kept_part(self, break_index: int, index: int, part: Tensor) -> Tensor:
        return self._kept.copy(part, place=("result", break_index, index))
