"""The device side of a worker on the native CPU kernels: library -> pool of threads -> packed weights and pages.

Says why when they cannot be used: falling back to torch is the caller's decision, and is never silent.
"""

import logging
from dataclasses import dataclass

import psutil
import torch

from kernels.errors import KernelError
from kernels.native import Native, ThreadPool, load_native
from kernels.native_model import NativeModel
from kernels.native_spec import NativeLimits
from kernels.native_types import PAGE_SIZE
from protos.service.model_files import ModelFolder
from protos.wire.errors import UnsupportedFeature
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.kv_order import KVOrder
from worker_svc.kv.sizing import PoolRequest, pool_pages
from worker_svc.kv.sub_pools import bytes_per_page_of_all
from worker_svc.kv.token_to_kv_pool import KVGeometry
from worker_svc.models.native_source import NativeSource, native_source
from worker_svc.models.pool_geometries import pool_geometries
from worker_svc.runners.native import NativeRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSettings:
    """What the parts are built for."""

    dtype: torch.dtype
    device: torch.device
    page_size: int
    max_rows: int
    max_tokens: int
    threads: int
    kv_bytes: int | None
    num_pages: int | None


@dataclass(frozen=True, slots=True)
class NativePages:
    """The kernels' own pages, as the translator sees them."""

    geometry: KVGeometry


class NativeStack:
    """Made once at start; holds the parts for the process's life."""

    def __init__(self, folder: ModelFolder, settings: NativeSettings) -> None:
        """Load the library, pack the weights, reserve the pages.

        Raises:
            UnsupportedFeature: why the native kernels cannot run this model here.
            InvalidModelFile: the weight file is damaged, or is not the folder's.
            InvalidRequest: the pool's size cannot be had.
        """
        native = _library(settings)
        source = native_source(folder)
        self.config = source.config
        self.geometries = _geometries(source, settings)
        limits = NativeLimits(
            num_pages=tuple(geometry.num_pages for geometry in self.geometries),
            max_context=source.config.context_tokens,
            max_tokens=settings.max_tokens,
            max_rows=settings.max_rows,
        )
        threads = ThreadPool(native, threads=settings.threads)
        try:
            model = NativeModel(source.spec, source.weights, limits=limits, pool=threads)
        except KernelError as error:
            threads.close()
            raise UnsupportedFeature(str(error), field="kernels") from error
        self.translator = IndexTranslator([NativePages(geometry) for geometry in self.geometries])
        self.runner = NativeRunner(model)
        self.description = model.describe()


def _library(settings: NativeSettings) -> Native:
    problem = _settings_problem(settings)
    if problem is not None:
        raise UnsupportedFeature(problem, field="kernels")
    found = load_native()
    if not isinstance(found, Native):
        raise UnsupportedFeature(found.reason, field="kernels")
    return found


def _settings_problem(settings: NativeSettings) -> str | None:
    if settings.device.type != "cpu":
        return f"the native kernels are for the CPU, device is {settings.device.type}"
    if settings.dtype != torch.float32:
        return "the native kernels compute float32 on quantised weights, dtype is another"
    if settings.page_size != PAGE_SIZE:
        return f"the native kernels have pages of {PAGE_SIZE} tokens, page_size is {settings.page_size}"
    return None


def _geometries(source: NativeSource, settings: NativeSettings) -> tuple[KVGeometry, ...]:
    config, spec = source.config, source.spec
    request = PoolRequest(
        kv_bytes=settings.kv_bytes,
        num_pages=settings.num_pages,
        free_bytes=int(psutil.virtual_memory().available),
        useful_pages=1 + settings.max_rows * -(-config.context_tokens // PAGE_SIZE),
    )
    cost = bytes_per_page_of_all([spec.bytes_per_page(group, PAGE_SIZE) for group in range(spec.num_groups)])
    num_pages = pool_pages(request, bytes_per_page=cost)
    return pool_geometries(config, num_pages=num_pages, page_size=PAGE_SIZE, dtype=torch.float16, order=KVOrder.NATIVE)
