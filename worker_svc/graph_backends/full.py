"""One graph per key: the whole work in one piece, marked calls included."""

from collections.abc import Hashable
from dataclasses import dataclass

from worker_svc.device.break_points import BreakPoints
from worker_svc.device.device_graph import DeviceGraph, GraphDevice
from worker_svc.graph_backends.base import Outputs, Pause, Work, no_pause
from worker_svc.graph_backends.kept_tensors import KeptTensors


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: DeviceGraph
    outputs: Outputs


class FullBackend:
    """A `GraphBackend`."""

    name = "full"

    def __init__(self, device: GraphDevice, *, kept: KeptTensors, breaks: BreakPoints) -> None:
        self._device = device
        self._kept = kept
        self._breaks = breaks
        self._captured: dict[Hashable, _Captured] = {}

    def capture(self, key: Hashable, work: Work, *, pause: Pause = no_pause) -> Outputs:
        """See `GraphBackend.capture`."""
        for index, made in enumerate(work()):
            self._kept.reserve(made, place=index)
        self._device.synchronise()
        pause()
        with self._device.session() as session:
            recording = session.begin()
            try:
                with self._breaks.handled_by(recording):
                    results = work()
                outputs = tuple(self._kept.copy(part, place=index) for index, part in enumerate(results))
                graph = recording.end()
            finally:
                recording.abandon()
        self._captured[key] = _Captured(graph, outputs)
        return outputs

    def has(self, key: Hashable) -> bool:
        """See `GraphBackend.has`."""
        return key in self._captured

    def replay(self, key: Hashable) -> Outputs:
        """See `GraphBackend.replay`."""
        captured = self._captured[key]
        captured.graph.replay()
        return captured.outputs

    def close(self) -> None:
        """See `GraphBackend.close`."""
        self._captured.clear()
