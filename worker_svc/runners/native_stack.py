"""The device side of a worker on the native CPU kernels, built in the same order as the one over torch.

Library, threads and packed weights -> pages -> translator -> canary -> attention (the kernels' own, on their own pages)
-> runner. Says why the kernels cannot be used: falling back to torch is the caller's decision, and is never silent.
"""

from dataclasses import dataclass

import torch

from kernels.errors import KernelError
from kernels.native import Native, ThreadPool, load_native
from kernels.native_model import NativeModel
from kernels.native_spec import NativeLimits
from kernels.native_types import PAGE_SIZE
from protos.service.model_files import ModelFolder
from protos.wire.errors import InternalFault, InvalidRequest, UnsupportedFeature
from worker_svc.batch.canary_guard import KVCanary, make_canary
from worker_svc.device.memory import free_bytes
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.sizing import MIN_PAGES, FreeMemory
from worker_svc.kv.token_to_kv_pool import KVGeometry
from worker_svc.models.model_config import ModelConfig
from worker_svc.models.native_source import NativeSource, native_source
from worker_svc.models.pool_geometries import native_geometries
from worker_svc.numerics import DTYPES
from worker_svc.runners.build_order import BuildOrder, BuildStep
from worker_svc.runners.executor_settings import ExecutorSettings
from worker_svc.runners.native import NativeRunner
from worker_svc.runners.pool_sizes import sized


@dataclass(frozen=True, slots=True)
class NativePages:
    """The kernels' own pages, as the translator sees them."""

    geometry: KVGeometry


class NativeStack:
    """Made once at start; holds the parts for the process's life. Closed by its owner if it is not completed."""

    config: ModelConfig
    geometries: tuple[KVGeometry, ...]
    """Of every sub-pool."""
    translator: IndexTranslator
    canary: KVCanary | None
    runner: NativeRunner

    def __init__(self, settings: ExecutorSettings, *, threads: int) -> None:
        self._settings = settings
        self._device = torch.device(settings.device)
        self._order = BuildOrder()
        self._num_threads = threads
        self._threads: ThreadPool | None = None
        self._model: NativeModel | None = None
        self._free_before = free_bytes(self._device)

    def load_weights(self, folder: ModelFolder) -> None:
        """Load the library and pack the folder's weights.

        Raises:
            UnsupportedFeature: why the native kernels cannot run this model here.
            InvalidModelFile: the weight file is damaged, or is not the folder's.
        """
        self._order.enter(BuildStep.WEIGHTS)
        native = _library(self._settings)
        source = native_source(folder)
        self.config = source.config
        self._threads = ThreadPool(native, threads=self._num_threads)
        self._model = _packed(source, self._settings, threads=self._threads)

    def make_pools(self) -> None:
        """Reserve the pages in what memory the weights left.

        Raises:
            InvalidRequest: the size is too small, or more than there is.
        """
        self._order.enter(BuildStep.POOLS)
        assert self._model is not None, "the weights are packed"
        sizeless = native_geometries(self.config)
        self.geometries = sized(
            sizeless,
            settings=self._settings,
            memory=FreeMemory(before_load=self._free_before, after_load=free_bytes(self._device)),
            context_tokens=self.config.context_tokens,
            windows=[geometry.window_tokens for geometry in sizeless],
        )
        counts = [geometry.num_pages for geometry in self.geometries]
        try:
            self._model.reserve_pages(counts)
        except KernelError as error:
            message = f"{counts} pages cannot be had: {error}"
            raise InvalidRequest(message, field="num_pages") from error

    def make_translator(self) -> None:
        """Make the one owner of where a page lies."""
        self._order.enter(BuildStep.TRANSLATOR)
        self.translator = IndexTranslator([NativePages(geometry) for geometry in self.geometries])

    def make_canary(self) -> None:
        """Make the shadow of the pages, if one is wanted."""
        self._order.enter(BuildStep.CANARY)
        self.canary = make_canary(self._settings.kv_canary, self.translator, device=self._device)

    def bind_attention(self) -> None:
        """Prove that the kernels' attention reads the pages that slots are translated for.

        Raises:
            InternalFault: it has other pages.
        """
        self._order.enter(BuildStep.ATTENTION)
        assert self._model is not None, "the weights are packed"
        for pool, count in zip(self.translator.pools, self._model.limits.num_pages, strict=True):
            if (pool.geometry.num_pages, pool.geometry.page_size) != (count, PAGE_SIZE):
                raise InternalFault("the native attention is bound to pages that the index translator does not know")

    def make_runners(self) -> None:
        """Make the execution path."""
        self._order.enter(BuildStep.RUNNERS)
        assert self._model is not None, "the weights are packed"
        self.runner = NativeRunner(self._model)

    def make_graphs(self) -> None:
        """None: a step is one call of the kernels already."""
        self._order.enter(BuildStep.GRAPHS)

    @property
    def description(self) -> str:
        """For people."""
        assert self._model is not None, "the weights are packed"
        return self._model.describe()

    def close(self) -> None:
        """Free what was made so far. Safe to repeat."""
        if self._model is not None:
            self._model.close()
        if self._threads is not None:
            self._threads.close()


def _packed(source: NativeSource, settings: ExecutorSettings, *, threads: ThreadPool) -> NativeModel:
    """The weights, with the fewest pages: how many there can be is known once the weights are there."""
    limits = NativeLimits(
        num_pages=(MIN_PAGES,) * source.spec.num_groups,
        max_context=source.config.context_tokens,
        max_tokens=settings.max_tokens,
        max_rows=settings.max_rows,
    )
    try:
        return NativeModel(source.spec, source.weights, limits=limits, pool=threads)
    except KernelError as error:
        raise UnsupportedFeature(str(error), field="kernels") from error


def _library(settings: ExecutorSettings) -> Native:
    problem = _settings_problem(settings)
    if problem is not None:
        raise UnsupportedFeature(problem, field="kernels")
    found = load_native()
    if not isinstance(found, Native):
        raise UnsupportedFeature(found.reason, field="kernels")
    return found


def _settings_problem(settings: ExecutorSettings) -> str | None:
    if torch.device(settings.device).type != "cpu":
        return f"the native kernels are for the CPU, device is {settings.device}"
    if DTYPES[settings.dtype] != torch.float32:
        return "the native kernels compute float32 on quantised weights, dtype is another"
    if settings.page_size != PAGE_SIZE:
        return f"the native kernels have pages of {PAGE_SIZE} tokens, page_size is {settings.page_size}"
    return None
