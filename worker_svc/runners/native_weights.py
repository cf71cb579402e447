"""A model folder -> its weights, packed by the native CPU kernels, with as few pages as there can be.

How many pages there will be is known once the weights are there. Says why the kernels cannot be used.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.errors import KernelError
from kernels.native import MAX_THREADS, Native, ThreadPool, load_native
from kernels.native_model import NativeModel
from kernels.native_spec import NativeLimits
from protos.service.model_config import ModelConfig
from protos.service.model_files import ModelFolder
from protos.wire.errors import InvalidRequest, UnsupportedFeature
from worker_svc.kv.sizing import MIN_PAGES
from worker_svc.models.native_source import NativeSource, native_source
from worker_svc.runners.executor_settings import ExecutorSettings
from worker_svc.runners.native_rules import native_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWeights:
    """Closed by whoever packed them."""

    config: ModelConfig
    model: NativeModel
    threads: ThreadPool
    weights_bytes: int
    """As the file stores them; packed they take as much, within padding."""

    def reserve(self, num_pages: Sequence[int]) -> None:
        """Make the pages of every sub-pool.

        Raises:
            InvalidRequest: the system does not give the memory.
        """
        try:
            self.model.reserve_pages(num_pages)
        except KernelError as error:
            raise InvalidRequest(f"{list(num_pages)} pages cannot be had: {error}", field="num_pages") from error

    def close(self) -> None:
        """Free weights, pages and threads. Safe to repeat."""
        self.model.close()
        self.threads.close()


def pack_weights(folder: ModelFolder, settings: ExecutorSettings, *, threads: int) -> NativeWeights:
    """Load the library and pack the folder's weights.

    Raises:
        UnsupportedFeature: why the native kernels cannot run this model here.
        InvalidModelFile: the weight file is damaged, or is not the folder's.
    """
    native = _library(settings)
    source = native_source(folder)
    pool = ThreadPool(native, threads=min(threads, MAX_THREADS))
    try:
        model = _packed(source, settings, threads=pool)
    except UnsupportedFeature:
        pool.close()
        raise
    weights_bytes = sum(tensor.data.nbytes for tensor in source.weights.values())
    return NativeWeights(config=source.config, model=model, threads=pool, weights_bytes=weights_bytes)


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
    problem = native_problem(settings)
    if problem is not None:
        raise UnsupportedFeature(problem, field="kernels")
    found = load_native()
    if not isinstance(found, Native):
        raise UnsupportedFeature(found.reason, field="kernels")
    return found
