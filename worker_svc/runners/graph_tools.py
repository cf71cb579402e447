"""The graph device of a worker and the back-ends on it. What cannot be had is refused, or replaced by name."""

import logging

import torch

from protos.wire.enums import GraphPhase
from protos.wire.errors import UnsupportedFeature
from worker_svc.device.break_points import BreakPoints
from worker_svc.device.cuda_graphs import CudaGraphDevice
from worker_svc.device.device_graph import GraphDevice
from worker_svc.device.tape import TapeDevice
from worker_svc.graph_backends.base import GraphBackend
from worker_svc.graph_backends.breakable import BreakableBackend
from worker_svc.graph_backends.compiled import CompiledBackend, why_not_compiled
from worker_svc.graph_backends.full import FullBackend
from worker_svc.graph_backends.kept_tensors import KeptTensors
from worker_svc.runners.graph_settings import PHASES_OF_GRAPH, GraphSettings

logger = logging.getLogger(__name__)

BACKENDS = ("full", "breakable", "compiled")


def check_graph_settings(settings: GraphSettings) -> None:
    """Before anything is loaded.

    Raises:
        UnsupportedFeature: an unknown name, or a back-end that this machine cannot have.
    """
    if settings.graph not in PHASES_OF_GRAPH:
        raise UnsupportedFeature(f"graph is {settings.graph!r}, known: {', '.join(PHASES_OF_GRAPH)}", field="graph")
    for field in ("decode_graph_backend", "prefill_graph_backend"):
        name = getattr(settings, field)
        if name not in BACKENDS:
            raise UnsupportedFeature(f"{field} is {name!r}, known: {', '.join(BACKENDS)}", field=field)
        if name == "compiled" and settings.graph != "off" and (problem := why_not_compiled()) is not None:
            raise UnsupportedFeature(f"{field} compiled cannot be had: {problem}", field=field)


class GraphTools:
    """One device, one pool of graph memory and one set of kept tensors for all phases and shapes."""

    def __init__(self, device: torch.device, *, breaks: BreakPoints) -> None:
        self.is_cpu = device.type == "cpu"
        self.device: GraphDevice = TapeDevice() if self.is_cpu else CudaGraphDevice(device)
        self.kept = KeptTensors(self.device)
        self._breaks = breaks

    def backend(self, settings: GraphSettings, phase: GraphPhase) -> GraphBackend:
        """Of the phase's runner."""
        name = backend_name(settings, phase, is_cpu=self.is_cpu)
        if name == "compiled":
            return CompiledBackend(kept=self.kept, breaks=self._breaks)
        kind = FullBackend if name == "full" else BreakableBackend
        return kind(self.device, kept=self.kept, breaks=self._breaks)


def backend_name(settings: GraphSettings, phase: GraphPhase, *, is_cpu: bool) -> str:
    """On a GPU attention plans each step anew, at addresses of its own: it cannot lie inside a captured graph."""
    name = settings.backend(phase)
    if name == "full" and not is_cpu:
        why = "no attention back-end keeps its plan of a step at fixed addresses"
        logger.warning("full graphs cannot be had, breakable ones are used", extra={"phase": phase.name, "why": why})
        return "breakable"
    return name
