"""One graph per key: the whole work in one piece, marked calls included."""

from collections.abc import Hashable
from dataclasses import dataclass

from worker_svc.device.break_points import BreakPoints
from worker_svc.device.device_graph import DeviceGraph, GraphDevice
from worker_svc.graph_backends.base import KeyedBackend, Outputs, Pause, Work, no_pause
from worker_svc.graph_backends.kept_tensors import KeptTensors


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: DeviceGraph
    outputs: Outputs


class FullBackend(KeyedBackend[_Captured]):
    """A `GraphBackend`."""

    name = "full"

    def __init__(self, device: GraphDevice, *, kept: KeptTensors, breaks: BreakPoints) -> None:
        super().__init__()
        self.holds_marked = device.inlines_marked
        self._device = device
        self._kept = kept
        self._breaks = breaks

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
                recording.join()
                outputs = tuple(self._kept.copy(part, place=index) for index, part in enumerate(results))
                graph = recording.end()
            finally:
                recording.abandon()
        self._captured[key] = _Captured(graph, outputs)
        return outputs

    def replay(self, key: Hashable) -> Outputs:
        """See `GraphBackend.replay`."""
        captured = self._captured[key]
        captured.graph.replay()
        return captured.outputs
