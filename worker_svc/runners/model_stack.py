"""The device side of a worker over torch, built part by part in the one order that works.

Weights -> pools -> translator -> canary -> attention (bound and verified) -> runners -> graphs. Guards: another order
raises, and the pools are sized from what the weights leave, before anything else takes memory.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from protos.service.model_files import ModelFolder
from protos.wire.enums import GraphPhase
from worker_svc.attention.base import AttentionBackend
from worker_svc.batch.canary_guard import KVCanary, make_canary
from worker_svc.device.memory import free_bytes
from worker_svc.forward_context import ForwardContext
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.sizing import FreeMemory, running_limit
from worker_svc.kv.token_to_kv_pool import TokenToKVPool
from worker_svc.model_runner import ModelRunner
from worker_svc.models.registry import LoadedModel, load_model
from worker_svc.numerics import Numerics
from worker_svc.runners.attention_parts import AttentionParts
from worker_svc.runners.build_order import BuildOrder, BuildStep
from worker_svc.runners.eager import EagerRunner
from worker_svc.runners.executor_settings import ExecutorSettings
from worker_svc.runners.graph_captures import GraphCaptures
from worker_svc.runners.graph_memory_need import GraphNeed
from worker_svc.runners.graph_parts import GraphLimits, check_graph_settings, graph_captures, wanted_sizes
from worker_svc.runners.pool_sizes import known_graph_bytes, remember_graph_bytes, sized


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """What the parts are built for: the settings, and what some of their names stand for."""

    executor: ExecutorSettings
    numerics: Numerics
    dtype: torch.dtype
    device: torch.device
    threads: int = 1
    """Of attention that has its own."""


class ModelStack:
    """Made once at start; holds the parts for the process's life."""

    loaded: LoadedModel
    pools: tuple[TokenToKVPool, ...]
    """One for each sub-pool."""
    translator: IndexTranslator
    canary: KVCanary | None
    attention: tuple[AttentionBackend[Any], ...]
    """One for each pool."""
    runner: EagerRunner
    captures: GraphCaptures | None
    """With the runners that replay graphs; None: there are none."""

    _attention_parts: AttentionParts
    _model_runner: ModelRunner
    _context: ForwardContext

    def __init__(self, settings: StackSettings) -> None:
        self._settings = settings
        check_graph_settings(settings.executor.graphs)
        self._order = BuildOrder()
        self._graph_bytes = 0
        self._weights = ""
        self._free_before = free_bytes(settings.device)

    def load_weights(self, folder: ModelFolder) -> None:
        """Read the folder's weights and build its model."""
        self._order.enter(BuildStep.WEIGHTS)
        settings = self._settings
        self.loaded = load_model(folder, numerics=settings.numerics, dtype=settings.dtype, device=settings.device)
        self._weights = folder.card.weights_fingerprint
        self._graph_bytes = known_graph_bytes(settings.executor, weights=self._weights) or self._estimate()

    def make_pools(self) -> None:
        """Reserve the KV pools in what memory the weights left, in the form that attention reads.

        Raises:
            InvalidRequest: the pool's size is too small, or more than there is.
            UnsupportedFeature: the attention back-ends that are asked for cannot work.
        """
        self._order.enter(BuildStep.POOLS)
        settings, config = self._settings, self.loaded.config
        self._attention_parts = AttentionParts(settings.executor, config, threads=settings.threads)
        sizeless = self._attention_parts.sizeless(config, page_size=settings.executor.page_size)
        geometries = sized(
            sizeless,
            settings=settings.executor,
            memory=FreeMemory(before_load=self._free_before, after_load=free_bytes(settings.device)),
            context_tokens=config.context_tokens,
            graph_bytes=self._graph_bytes,
            windows=[geometry.window_tokens for geometry in sizeless],
        )
        self.pools = tuple(TokenToKVPool(geometry, device=settings.device) for geometry in geometries)

    def make_translator(self) -> None:
        """Make the one owner of where a page lies."""
        self._order.enter(BuildStep.TRANSLATOR)
        self.translator = IndexTranslator(self.pools)

    def make_canary(self) -> None:
        """Make the shadow of the pools, if one is wanted."""
        self._order.enter(BuildStep.CANARY)
        settings = self._settings
        self.canary = make_canary(settings.executor.kv_canary, self.translator, device=settings.device)

    def bind_attention(self) -> None:
        """Make the attention back-ends that were chosen, on the pools that slots are translated for."""
        self._order.enter(BuildStep.ATTENTION)
        self.attention = self._attention_parts.bind(self.pools, self.translator)

    def make_runners(self) -> None:
        """Make the execution paths."""
        self._order.enter(BuildStep.RUNNERS)
        self._model_runner, self._context = ModelRunner(self.loaded.model), ForwardContext(*self.attention)
        self.runner = EagerRunner(self._model_runner, self._context)

    def make_graphs(self) -> None:
        """Make the runners that replay graphs. Nothing is captured yet: the worker serves meanwhile.

        Raises:
            InvalidRequest: the buckets that are asked for cannot be had; says which can.
        """
        self._order.enter(BuildStep.GRAPHS)
        settings = self._settings.executor
        geometry = self.pools[0].geometry
        max_rows = running_limit(
            capacity_tokens=(geometry.num_pages - 1) * geometry.page_size,
            context_tokens=self.loaded.config.context_tokens,
            asked=settings.max_rows,
        )
        self.captures = graph_captures(
            settings.graphs,
            model_runner=self._model_runner,
            context=self._context,
            limits=GraphLimits(
                max_rows=max_rows,
                max_tokens=settings.max_tokens,
                free_bytes=free_bytes(self._settings.device),
                need=self._graph_need(),
            ),
            device=self._settings.device,
            remember=partial(remember_graph_bytes, settings, weights=self._weights),
        )

    def _graph_need(self) -> GraphNeed:
        return GraphNeed(self.loaded.config, self._settings.dtype.itemsize)

    def _estimate(self) -> int:
        """What graphs will take, where no start before this one has measured it."""
        settings = self._settings.executor
        limits = {GraphPhase.DECODE: settings.max_rows, GraphPhase.PREFILL: settings.max_tokens}
        return self._graph_need().estimate(
            (phase, wanted_sizes(settings.graphs, phase, limit=limit, device=self._settings.device.type))
            for phase, limit in limits.items()
        )

    @property
    def description(self) -> str:
        """For people."""
        return self._attention_parts.describe()
