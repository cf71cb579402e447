"""The graph runners of a stack and what they share, built when everything that a graph calls exists.

One device, one pool of graph memory, one set of static buffers and kept tensors for both phases. Chooses sizes and
back-ends; a choice that cannot work is refused by name, with what would work.
"""

import logging
import time
from dataclasses import dataclass

import torch

from protos.wire.bucket_lists import default_sizes, list_problem, shown
from protos.wire.enums import GraphPhase
from protos.wire.errors import InvalidRequest, UnsupportedFeature
from worker_svc.device.cuda_graphs import CudaGraphDevice
from worker_svc.device.device_graph import GraphDevice
from worker_svc.device.tape import TapeDevice
from worker_svc.forward_context import ForwardContext
from worker_svc.graph_backends.base import GraphBackend
from worker_svc.graph_backends.breakable import BreakableBackend
from worker_svc.graph_backends.compiled import CompiledBackend, why_not_compiled
from worker_svc.graph_backends.full import FullBackend
from worker_svc.graph_backends.kept_tensors import KeptTensors
from worker_svc.model_runner import ModelRunner
from worker_svc.runners.decode_graph import DecodeGraphRunner
from worker_svc.runners.eligibility import GraphShapes
from worker_svc.runners.graph_captures import CaptureParts, GraphCaptures, Remember
from worker_svc.runners.graph_memory_need import GraphNeed
from worker_svc.runners.graph_runner import GraphRunner
from worker_svc.runners.graph_settings import PHASES_OF_GRAPH, GraphSettings
from worker_svc.runners.prefill_graph import PrefillGraphRunner
from worker_svc.runners.static_buffers import StaticBuffers

logger = logging.getLogger(__name__)

BACKENDS = ("full", "breakable", "compiled")
_FIELDS = {GraphPhase.DECODE: "decode_buckets", GraphPhase.PREFILL: "prefill_buckets"}
_RUNNERS: dict[GraphPhase, type[GraphRunner]] = {
    GraphPhase.DECODE: DecodeGraphRunner,
    GraphPhase.PREFILL: PrefillGraphRunner,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLimits:
    """What plans and memory allow."""

    max_rows: int
    max_tokens: int
    free_bytes: int
    """What graphs may take."""
    need: GraphNeed

    def of(self, phase: GraphPhase) -> int:
        """The largest size of the phase that a plan can have."""
        return self.max_rows if phase is GraphPhase.DECODE else self.max_tokens


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


def wanted_sizes(settings: GraphSettings, phase: GraphPhase, *, limit: int, device: str) -> tuple[int, ...]:
    """What will be captured of a phase; nothing if it is off.

    Raises:
        InvalidRequest: the list that was asked for cannot be used; names the largest part of it that can.
    """
    if not settings.captures(phase):
        return ()
    asked = settings.asked(phase)
    problem = list_problem(asked, limit=limit)
    if problem is not None:
        raise InvalidRequest(f"{_FIELDS[phase]} {problem}", field=_FIELDS[phase])
    return asked or default_sizes(phase, limit=limit, device=device)


def graph_captures(
    settings: GraphSettings,
    *,
    model_runner: ModelRunner,
    context: ForwardContext,
    limits: GraphLimits,
    device: torch.device,
    remember: Remember,
) -> GraphCaptures | None:
    """The runners of the phases that are wanted, with every bucket still to be captured; None if none is.

    Raises:
        InvalidRequest: a list of sizes cannot be used, or there is no memory for it.
    """
    sizes = {phase: wanted_sizes(settings, phase, limit=limits.of(phase), device=device.type) for phase in GraphPhase}
    sizes = {phase: found for phase, found in sizes.items() if found}
    if not sizes:
        return None
    for phase, found in sizes.items():
        _check_memory(phase, found, limits=limits)
    graph_device: GraphDevice = TapeDevice() if device.type == "cpu" else CudaGraphDevice(device)
    kept = KeptTensors(graph_device)
    buffers = StaticBuffers(max_tokens=max(found[-1] for found in sizes.values()), device=device)
    runners = tuple(
        _RUNNERS[phase](
            model_runner,
            context,
            backend=_backend(_backend_name(settings, phase, device), graph_device, kept=kept, context=context),
            shapes=GraphShapes(
                phase=phase,
                sizes=found,
                slots=min(settings.graph_slots, limits.max_rows) if phase is GraphPhase.PREFILL else 0,
                is_debugged=settings.debug_graph,
            ),
            buffers=buffers,
        )
        for phase, found in sizes.items()
    )
    parts = CaptureParts(
        device=graph_device,
        kept=kept,
        num_sub_pools=context.num_sub_pools,
        torch_device=device,
        wait_s=settings.capture_wait_s,
        remember=remember,
    )
    return GraphCaptures(runners, parts=parts, clock_ns=time.monotonic_ns)


def _check_memory(phase: GraphPhase, sizes: tuple[int, ...], *, limits: GraphLimits) -> None:
    fitting = limits.need.largest_fitting(phase, sizes, free_bytes=limits.free_bytes)
    if fitting == sizes:
        return
    needed = limits.need.of_size(phase, sizes[-1])
    message = (
        f"{_FIELDS[phase]}: a graph of {sizes[-1]} takes about {needed} bytes, {limits.free_bytes} are free: "
        f"what would fit is {shown(fitting)}"
    )
    raise InvalidRequest(message, field=_FIELDS[phase])


def _backend_name(settings: GraphSettings, phase: GraphPhase, device: torch.device) -> str:
    """On a GPU attention plans each step anew, at addresses of its own: it cannot lie inside a captured graph."""
    name = settings.backend(phase)
    if name == "full" and device.type != "cpu":
        why = "no attention back-end keeps its plan of a step at fixed addresses"
        logger.warning("full graphs cannot be had, breakable ones are used", extra={"phase": phase.name, "why": why})
        return "breakable"
    return name


def _backend(name: str, device: GraphDevice, *, kept: KeptTensors, context: ForwardContext) -> GraphBackend:
    if name == "compiled":
        return CompiledBackend(kept=kept, breaks=context.breaks)
    kind = FullBackend if name == "full" else BreakableBackend
    return kind(device, kept=kept, breaks=context.breaks)
