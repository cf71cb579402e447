"""The graphs of the torch stack, from its settings: checked first, their memory set aside, their runners made last."""

import logging
import time
from functools import partial

from protos.service.model_config import ModelConfig
from worker_svc.device.memory import free_bytes
from worker_svc.numerics import ReproducibleNumerics
from worker_svc.runners.dispatch import RunnerDispatch
from worker_svc.runners.eager import EagerRunner
from worker_svc.runners.execution_paths import ExecutionPaths, one_path
from worker_svc.runners.graph_captures import CaptureParts, GraphCaptures
from worker_svc.runners.graph_memory_need import GraphNeed, known_graph_bytes, remember_graph_bytes
from worker_svc.runners.graph_parts import graph_runners
from worker_svc.runners.graph_sizes import GraphLimits, check_memory, wanted_sizes
from worker_svc.runners.graph_tools import GraphTools, check_graph_settings
from worker_svc.runners.stack_settings import StackSettings

logger = logging.getLogger(__name__)


class StackGraphs:
    """Made before anything is loaded."""

    def __init__(self, settings: StackSettings) -> None:
        """Raises UnsupportedFeature for a choice that this machine cannot have."""
        check_graph_settings(settings.executor.graphs)
        self._settings = settings
        if settings.executor.numerics == ReproducibleNumerics.name and settings.executor.graphs.uses("compiled"):
            logger.warning(
                "compiled graphs round their own way: log-probabilities differ in their last bits from eager steps",
                extra={"numerics": settings.executor.numerics},
            )

    def planned_bytes(self, config: ModelConfig, *, weights: str) -> int:
        """What graphs will take: what the last start of a worker like this one measured, or an estimate.

        Raises:
            InvalidRequest: the sizes that are asked for cannot be used; says which can.
        """
        settings = self._settings.executor
        sizes = wanted_sizes(settings.graphs, self._limits(settings.max_rows))
        return known_graph_bytes(settings, weights=weights) or self._need(config).estimate(sizes.items())

    def paths(self, eager: EagerRunner, config: ModelConfig, *, max_rows: int, weights: str) -> ExecutionPaths:
        """The graph runners before `eager`, with everything still to be captured: the worker serves meanwhile.

        Raises:
            InvalidRequest: there is no memory for the sizes; says for which there is.
        """
        settings, device = self._settings.executor, self._settings.device
        asked = settings.graphs
        sizes = wanted_sizes(asked, self._limits(max_rows))
        if not sizes:
            return one_path(eager)
        check_memory(sizes, self._need(config), free_bytes=free_bytes(device))
        tools = GraphTools(device, context=eager.context)
        slots = min(asked.graph_slots, max_rows)
        runners = graph_runners(asked, sizes, eager=eager, tools=tools, slots=slots, device=device)
        parts = CaptureParts(
            device=tools.device,
            kept=tools.kept,
            num_sub_pools=eager.context.num_sub_pools,
            torch_device=device,
            is_divisible=tools.is_cpu,
            wait_s=asked.capture_wait_s,
            remember=partial(remember_graph_bytes, settings, weights=weights),
        )
        captures = GraphCaptures(runners, parts=parts, clock_ns=time.monotonic_ns)
        return ExecutionPaths(dispatch=RunnerDispatch((*runners, eager), on_miss=captures.missed), captures=captures)

    def _need(self, config: ModelConfig) -> GraphNeed:
        return GraphNeed(config, self._settings.dtype.itemsize)

    def _limits(self, max_rows: int) -> GraphLimits:
        settings = self._settings
        return GraphLimits(max_rows=max_rows, max_tokens=settings.executor.max_tokens, device=settings.device.type)
