"""One graph per key: the whole work in one piece. Marked calls are recorded like everything else."""

from collections.abc import Hashable
from dataclasses import dataclass

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

    def __init__(self, device: GraphDevice, *, kept: KeptTensors) -> None:
        self._device = device
        self._kept = kept
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
                outputs = tuple(self._kept.copy(made, place=index) for index, made in enumerate(work()))
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
