"""The device side of a worker over torch, built part by part in the one order that works.

Weights -> pools -> translator -> canary -> attention (bound and verified) -> runners -> graphs. Guards: another order
raises, and the pools are sized from what the weights leave, before anything else takes memory.
"""

from typing import Any

from protos.service.model_files import ModelFolder
from worker_svc.attention.base import AttentionBackend
from worker_svc.batch.canary_guard import KVCanary, make_canary
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.token_to_kv_pool import TokenToKVPool
from worker_svc.models.registry import LoadedModel, ModelSource
from worker_svc.runners.attention_parts import AttentionParts
from worker_svc.runners.build_order import BuildOrder, BuildStep
from worker_svc.runners.eager import EagerRunner, eager_runner
from worker_svc.runners.pool_sizes import PoolSizes
from worker_svc.runners.stack_graphs import StackGraphs
from worker_svc.runners.stack_settings import StackSettings


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

    _attention_parts: AttentionParts

    def __init__(self, settings: StackSettings) -> None:
        self._settings = settings
        self._graphs = StackGraphs(settings)
        self._order = BuildOrder()
        self._sizes = PoolSizes(settings.executor)
        self._fingerprint = ""

    def load_weights(self, folder: ModelFolder) -> None:
        """Read the folder's weights and build its model; before that, refuse what is clear from their headers.

        Raises:
            InvalidModelFile: the weights are damaged, or not the folder's.
            UnsupportedFeature: no family computes them, or the attention back-ends that are asked for cannot work.
        """
        self._order.enter(BuildStep.WEIGHTS)
        settings = self._settings
        source = ModelSource(folder)
        self._attention_parts = AttentionParts(settings.executor, source.config, threads=settings.threads)
        self.loaded = source.load(numerics=settings.numerics, dtype=settings.dtype, device=settings.device)
        self._fingerprint = folder.card.weights_fingerprint

    def make_pools(self) -> None:
        """Reserve the KV pools in what memory the weights left, in the form that attention reads.

        Raises:
            InvalidRequest: the pool's size is too small, or more than there is.
        """
        self._order.enter(BuildStep.POOLS)
        settings, config = self._settings, self.loaded.config
        sizeless = self._attention_parts.sizeless(config, page_size=settings.executor.page_size)
        geometries = self._sizes.sized(
            sizeless,
            context_tokens=config.context_tokens,
            graph_bytes=self._graphs.planned_bytes(config, weights=self._fingerprint),
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
        self.runner = eager_runner(self.loaded.model, *self.attention)

    def make_graphs(self) -> None:
        """Make the runners that replay graphs. Nothing is captured yet.

        Raises:
            InvalidRequest: there is no memory for what is asked for; says for what there is.
        """
        self._order.enter(BuildStep.GRAPHS)
        config, asked = self.loaded.config, self._settings.executor.max_rows
        max_rows = self.pools[0].geometry.running_limit(context_tokens=config.context_tokens, asked=asked)
        self.paths = self._graphs.paths(self.runner, config, max_rows=max_rows, weights=self._fingerprint)

    @property
    def description(self) -> str:
        """For people."""
        return self._attention_parts.describe()
