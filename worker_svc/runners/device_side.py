"""Chooses what executes a model, torch or the native kernels, and builds it. A fallback is logged with its reason."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import psutil
import torch

from protos.service.model_config import ModelConfig
from protos.service.model_files import ModelFolder
from protos.wire.errors import UnsupportedFeature
from worker_svc.batch.canary_guard import KVCanary
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.token_to_kv_pool import KVGeometry
from worker_svc.numerics import DTYPES, FastNumerics, numerics_by_name
from worker_svc.runners.execution_paths import ExecutionPaths, one_path
from worker_svc.runners.executor_settings import ExecutorSettings
from worker_svc.runners.model_stack import ModelStack
from worker_svc.runners.native_stack import NativeStack
from worker_svc.runners.stack_settings import StackSettings

logger = logging.getLogger(__name__)

KERNELS = ("auto", "native", "torch")


class _Stack(Protocol):
    """A device side that is built part by part; any other order than this one raises."""

    def load_weights(self, folder: ModelFolder) -> None: ...

    def make_pools(self) -> None: ...

    def make_translator(self) -> None: ...

    def make_canary(self) -> None: ...

    def bind_attention(self) -> None: ...

    def make_runners(self) -> None: ...

    def make_graphs(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSide:
    """The parts that a worker is made of, from either stack."""

    paths: ExecutionPaths
    translator: IndexTranslator
    canary: KVCanary | None
    geometries: tuple[KVGeometry, ...]
    """Of every sub-pool."""
    config: ModelConfig
    state_bytes: int
    """Of one token's final hidden state."""
    weights_bytes: int
    """Of the model, on the device."""
    kernels: str
    """For people: start line, metric, benchmark rows."""


def device_side(folder: ModelFolder, settings: ExecutorSettings) -> DeviceSide:
    """The parts that the settings ask for. Sets torch's thread count, which is one per process.

    Raises:
        InvalidModelFile, UnsupportedFeature, InvalidRequest: as `build_tp_model_worker`.
    """
    if settings.kernels not in KERNELS:
        raise UnsupportedFeature(f"kernels is {settings.kernels!r}, known: {', '.join(KERNELS)}", field="kernels")
    if settings.dtype not in DTYPES:
        raise UnsupportedFeature(f"dtype is {settings.dtype!r}, known: {', '.join(sorted(DTYPES))}", field="dtype")
    if settings.kernels == "torch" or settings.numerics != FastNumerics.name:
        return _torch_side(folder, settings)
    try:
        return _native_side(folder, settings)
    except UnsupportedFeature as error:
        if settings.kernels == "native":
            raise
        logger.warning("no native kernels: torch is used, which is several times slower", extra={"why": error.message})
    return _torch_side(folder, settings)


def _usable_cores() -> int:
    """Physical cores that this process may run on."""
    return max(1, min(psutil.cpu_count(logical=False) or 1, len(psutil.Process().cpu_affinity())))


def _threads(settings: ExecutorSettings) -> int:
    """As many as are asked for, or the usable cores; says what is slower than it could be."""
    cores = _usable_cores()
    threads = settings.threads or cores
    if threads > cores:
        logger.warning("more threads than cores: they wait for each other", extra={"threads": threads, "cores": cores})
    elif cores == 1:
        logger.warning("one core: steps take turns on it with the scheduler and its callers", extra={"cores": cores})
    return threads


def _native_side(folder: ModelFolder, settings: ExecutorSettings) -> DeviceSide:
    torch.set_num_threads(1)
    stack = NativeStack(settings, threads=_threads(settings))
    with ExitStack() as undone:
        undone.callback(stack.close)
        _build(stack, folder)
        undone.pop_all()
    if special := settings.graphs.special():
        logger.warning(
            "native kernels replay no graphs, a step is one call already: these settings change nothing",
            extra={"settings": special, "graphs_come_with": "kernels torch"},
        )
    return DeviceSide(
        paths=one_path(stack.runner),
        translator=stack.translator,
        canary=stack.canary,
        geometries=stack.geometries,
        config=stack.weights.config,
        state_bytes=stack.weights.config.hidden_size * DTYPES[settings.dtype].itemsize,
        weights_bytes=stack.weights.weights_bytes,
        kernels=stack.weights.model.describe(),
    )


def _torch_side(folder: ModelFolder, settings: ExecutorSettings) -> DeviceSide:
    threads = _threads(settings)
    torch.set_num_threads(threads)
    dtype, device = DTYPES[settings.dtype], torch.device(settings.device)
    numerics = numerics_by_name(settings.numerics, dtype=dtype, device=device)
    stack = ModelStack(StackSettings(executor=settings, numerics=numerics, dtype=dtype, device=device, threads=threads))
    _build(stack, folder)
    return DeviceSide(
        paths=stack.paths,
        translator=stack.translator,
        canary=stack.canary,
        geometries=tuple(pool.geometry for pool in stack.pools),
        config=stack.loaded.config,
        state_bytes=stack.loaded.config.hidden_size * dtype.itemsize,
        weights_bytes=stack.loaded.weights_bytes,
        kernels=stack.description,
    )


def _build(stack: _Stack, folder: ModelFolder) -> None:
    """Every part, in the one order that works."""
    stack.load_weights(folder)
    stack.make_pools()
    stack.make_translator()
    stack.make_canary()
    stack.bind_attention()
    stack.make_runners()
    stack.make_graphs()
