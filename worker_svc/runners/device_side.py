"""Chooses what executes a model, torch or the native kernels, and builds it. A fallback is logged with its reason."""

import logging
from dataclasses import dataclass

import psutil
import torch

from protos.service.model_files import ModelFolder
from protos.wire.errors import UnsupportedFeature
from worker_svc.attention.choice import AttentionChoice
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.token_to_kv_pool import KVGeometry
from worker_svc.models.model_config import ModelConfig
from worker_svc.numerics import DTYPES, FastNumerics, numerics_by_name
from worker_svc.runners.attention_parts import AttentionSettings
from worker_svc.runners.base import ForwardRunner
from worker_svc.runners.executor_settings import ExecutorSettings
from worker_svc.runners.model_stack import ModelStack, StackSettings
from worker_svc.runners.native_stack import NativeSettings, NativeStack

logger = logging.getLogger(__name__)

KERNELS = ("auto", "native", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSide:
    """The parts that a worker is made of, from either stack."""

    runner: ForwardRunner
    translator: IndexTranslator
    geometries: tuple[KVGeometry, ...]
    """Of every sub-pool."""
    config: ModelConfig
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


def _threads(settings: ExecutorSettings) -> int:
    return settings.threads or psutil.cpu_count(logical=False) or 1


def _native_side(folder: ModelFolder, settings: ExecutorSettings) -> DeviceSide:
    for name in (settings.prefill_attention, settings.decode_attention):
        if name not in {"auto", "native"}:
            raise UnsupportedFeature(f"the native kernels have their own attention, not {name}", field="kernels")
    torch.set_num_threads(1)
    stack = NativeStack(
        folder,
        NativeSettings(
            dtype=DTYPES[settings.dtype],
            device=torch.device(settings.device),
            page_size=settings.page_size,
            max_rows=settings.max_rows,
            max_tokens=settings.max_tokens,
            threads=_threads(settings),
            kv_bytes=settings.kv_bytes,
            num_pages=settings.num_pages,
        ),
    )
    return DeviceSide(
        runner=stack.runner,
        translator=stack.translator,
        geometries=stack.geometries,
        config=stack.config,
        kernels=stack.description,
    )


def _torch_side(folder: ModelFolder, settings: ExecutorSettings) -> DeviceSide:
    torch.set_num_threads(_threads(settings))
    dtype, device = DTYPES[settings.dtype], torch.device(settings.device)
    stack = ModelStack(
        StackSettings(
            numerics=numerics_by_name(settings.numerics, dtype=dtype, device=device),
            dtype=dtype,
            device=device,
            page_size=settings.page_size,
            max_rows=settings.max_rows,
            kv_bytes=settings.kv_bytes,
            num_pages=settings.num_pages,
            attention=AttentionSettings(
                prefill=settings.prefill_attention,
                decode=settings.decode_attention,
                plain=settings.kernels == "torch",
                threads=_threads(settings),
            ),
        )
    )
    stack.load_weights(folder)
    stack.make_pools()
    stack.make_translator()
    stack.bind_attention()
    stack.make_runners()
    return DeviceSide(
        runner=stack.runner,
        translator=stack.translator,
        geometries=tuple(pool.geometry for pool in stack.pools),
        config=stack.loaded.config,
        kernels=_torch_phrase(stack.attention_choice),
    )


def _torch_phrase(choice: AttentionChoice) -> str:
    is_plain = {choice.prefill, choice.decode} <= {"torch", "tiled"}
    return "torch" if is_plain else f"torch, {choice.describe()}"
