"""The graph runners of a stack, on shared tools and static buffers, with every bucket still to be captured."""

from collections.abc import Mapping

import torch

from protos.wire.enums import GraphPhase, HiddenMode
from worker_svc.runners.decode_graph import DecodeGraphRunner
from worker_svc.runners.eager import EagerRunner
from worker_svc.runners.eligibility import GraphShapes
from worker_svc.runners.graph_runner import GraphRunner
from worker_svc.runners.graph_settings import GraphSettings
from worker_svc.runners.graph_tools import GraphTools
from worker_svc.runners.prefill_graph import PrefillGraphRunner
from worker_svc.runners.static_buffers import StaticBuffers

_RUNNERS: dict[GraphPhase, type[GraphRunner]] = {
    GraphPhase.DECODE: DecodeGraphRunner,
    GraphPhase.PREFILL: PrefillGraphRunner,
}


def graph_runners(
    settings: GraphSettings,
    sizes: Mapping[GraphPhase, tuple[int, ...]],
    *,
    eager: EagerRunner,
    tools: GraphTools,
    slots: int,
    device: torch.device,
) -> tuple[GraphRunner, ...]:
    """One for each phase of `sizes`, on the model and the attention of `eager`. `slots`: rows of a prefill graph."""
    buffers = StaticBuffers(max_tokens=max(found[-1] for found in sizes.values()), device=device)
    runners = []
    for phase, found in sizes.items():
        shapes = GraphShapes(
            phase=phase,
            sizes=found,
            slots=slots if phase is GraphPhase.PREFILL else 0,
            hidden_mode=HiddenMode.FULL,
            is_debugged=settings.debug_graph,
        )
        backend = tools.backend(settings, phase, mode=shapes.mode, max_reqs=shapes.max_reqs)
        runners.append(
            _RUNNERS[phase](eager.model_runner, eager.context, backend=backend, shapes=shapes, buffers=buffers)
        )
    return tuple(runners)
