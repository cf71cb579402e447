"""The device side of a worker on the native CPU kernels, built in the same order as the one over torch.

Packed weights -> pages -> translator -> canary -> attention (the kernels' own, on their own pages) -> runner. Says why
the kernels cannot be used: falling back to torch is the caller's decision, and is never silent.
"""

from dataclasses import dataclass

import torch

from kernels.native_types import PAGE_SIZE
from protos.service.model_files import ModelFolder
from protos.wire.errors import InternalFault
from worker_svc.batch.canary_guard import KVCanary, make_canary
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.token_to_kv_pool import KVGeometry
from worker_svc.models.pool_geometries import native_geometries
from worker_svc.runners.build_order import BuildOrder, BuildStep
from worker_svc.runners.executor_settings import ExecutorSettings
from worker_svc.runners.native import NativeRunner
from worker_svc.runners.native_weights import NativeWeights, pack_weights
from worker_svc.runners.pool_sizes import PoolSizes


@dataclass(frozen=True, slots=True)
class NativePages:
    """The kernels' own pages, as the translator sees them."""

    geometry: KVGeometry


class NativeStack:
    """Made once at start; holds the parts for the process's life. Closed by its owner."""

    weights: NativeWeights
    geometries: tuple[KVGeometry, ...]
    """Of every sub-pool."""
    translator: IndexTranslator
    canary: KVCanary | None
    runner: NativeRunner

    def __init__(self, settings: ExecutorSettings, *, threads: int) -> None:
        self._settings = settings
        self._threads = threads
        self._order = BuildOrder()
        self._sizes = PoolSizes(settings)
        self._fingerprint = ""
        self._is_loaded = False

    def load_weights(self, folder: ModelFolder) -> None:
        """Load the library and pack the folder's weights.

        Raises:
            UnsupportedFeature: why the native kernels cannot run this model here.
            InvalidModelFile: the weight file is damaged, or is not the folder's.
        """
        self._order.enter(BuildStep.WEIGHTS)
        self.weights = pack_weights(folder, self._settings, threads=self._threads)
        self._is_loaded = True
        self._fingerprint = folder.card.weights_fingerprint

    def make_pools(self) -> None:
        """Reserve the pages in what memory the weights left.

        Raises:
            InvalidRequest: the size is too small, or more than there is.
        """
        self._order.enter(BuildStep.POOLS)
        config = self.weights.config
        self.geometries = self._sizes.sized(
            native_geometries(config), weights_fingerprint=self._fingerprint, context_tokens=config.context_tokens
        )
        self.weights.reserve([geometry.num_pages for geometry in self.geometries])

    def make_translator(self) -> None:
        """Make the one owner of where a page lies."""
        self._order.enter(BuildStep.TRANSLATOR)
        self.translator = IndexTranslator([NativePages(geometry) for geometry in self.geometries])

    def make_canary(self) -> None:
        """Make the shadow of the pages, if one is wanted."""
        self._order.enter(BuildStep.CANARY)
        self.canary = make_canary(self._settings.kv_canary, self.translator, device=torch.device("cpu"))

    def bind_attention(self) -> None:
        """Prove that the kernels' attention reads the pages that slots are translated for.

        Raises:
            InternalFault: it has other pages.
        """
        self._order.enter(BuildStep.ATTENTION)
        for pool, count in zip(self.translator.pools, self.weights.model.limits.num_pages, strict=True):
            if (pool.geometry.num_pages, pool.geometry.page_size) != (count, PAGE_SIZE):
                raise InternalFault("the native attention is bound to pages that the index translator does not know")

    def make_runners(self) -> None:
        """Make the execution path."""
        self._order.enter(BuildStep.RUNNERS)
        most_threads = self.weights.threads.threads if self._settings.threads is None else None
        self.runner = NativeRunner(self.weights.model, most_threads=most_threads)

    def close(self) -> None:
        """Free what was made so far. Safe to repeat."""
        if self._is_loaded:
            self.weights.close()
