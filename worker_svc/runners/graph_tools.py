"""The graph device of a worker and the back-ends on it. What cannot be had is refused, or replaced by name."""

import logging

import torch

from protos.wire.enums import ForwardMode, GraphPhase
from protos.wire.errors import UnsupportedFeature
from worker_svc.device.cuda_graphs import CudaGraphDevice
from worker_svc.device.device_graph import GraphDevice
from worker_svc.device.tape import TapeDevice
from worker_svc.forward_context import ForwardContext
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

    def __init__(self, device: torch.device, *, context: ForwardContext) -> None:
        self.is_cpu = device.type == "cpu"
        self.device: GraphDevice = TapeDevice() if self.is_cpu else CudaGraphDevice(device)
        self.kept = KeptTensors(self.device)
        self._context = context

    def backend(self, settings: GraphSettings, phase: GraphPhase, *, mode: ForwardMode, max_reqs: int) -> GraphBackend:
        """Of the phase's runner, whose graphs hold steps of `mode` with up to `max_reqs` rows."""
        name, breaks = settings.backend(phase), self._context.breaks
        if name == "compiled":
            return CompiledBackend(kept=self.kept, breaks=breaks)
        if name == "full" and self.device.inlines_marked:
            name = self._full_or_breakable(mode, max_reqs)
        kind = FullBackend if name == "full" else BreakableBackend
        return kind(self.device, kept=self.kept, breaks=breaks)

    def _full_or_breakable(self, mode: ForwardMode, max_reqs: int) -> str:
        """Attention lies inside a full graph only if its plan of a step has fixed addresses."""
        why = self._context.why_not_fixed(mode, max_reqs=max_reqs)
        if why is None:
            return "full"
        logger.warning("full graphs cannot be had, breakable ones are used", extra={"mode": mode.name, "why": why})
        return "breakable"
