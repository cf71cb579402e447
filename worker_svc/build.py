"""Builds a TpModelWorker from a model folder, for the composition root and for tests.

Says what the worker offers (`WorkerInfo`) from the parts it was built of, so that page size, pool size, limits and
features exist once.
"""

import secrets
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from protos.service.model_files import ModelCard, ModelFolder
from protos.wire.enums import Feature, HiddenMode, SubPoolKind
from protos.wire.errors import UnsupportedFeature
from protos.wire.limits import INCARNATION_BYTES, MAX_LOGPROBS, MAX_PLAN_BYTES, PROTOCOL_MAX
from protos.wire.worker_info import Fingerprints, SubPool, WorkerInfo, WorkerLimits
from worker_svc.batch.builder import BatchBuilder
from worker_svc.batch.forward_mode import EXECUTABLE_MODES
from worker_svc.numerics import DTYPES, numerics_by_name
from worker_svc.runners.dispatch import RunnerDispatch
from worker_svc.runners.model_stack import ModelStack, StackSettings
from worker_svc.tp_model_worker import TpModelWorker

FEATURES = frozenset({Feature.OUTPUT_LOGPROBS})
"""What is executed beyond the plain plan."""
WINDOW = 1
CACHED_RESULTS = 4
_DISTRIBUTIONS = ("forwardplane-worker", "forwardplane")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSettings:
    """How plans are executed. Made by the composition root, read once, at start."""

    numerics: str = "fast"
    """`reproducible` or `fast`."""
    dtype: str = "float32"
    """Of weights, activations and KV: `float32` or `bfloat16`."""
    device: str = "cpu"
    page_size: int = 16
    """Tokens a page."""
    kv_bytes: int | None = None
    """Size of the KV pool. Neither this nor `num_pages`: a share of the free memory."""
    num_pages: int | None = None
    """Pages of the KV pool, the sink included."""
    max_rows: int = 256
    """Most rows of a plan."""
    max_tokens: int = 2048
    """Most tokens of a plan."""
    threads: int | None = None
    """CPU threads of one operator. None: the physical cores."""


def build_tp_model_worker(folder: ModelFolder, settings: ExecutorSettings) -> TpModelWorker:
    """A worker ready for plans, with a new incarnation. Sets torch's thread count, which is one per process.

    Raises:
        InvalidModelFile: the weights are damaged or not the folder's.
        UnsupportedFeature: an unknown numerics, dtype or architecture, or a combination that cannot work.
        InvalidRequest: the KV pool's size cannot be had.
    """
    torch.set_num_threads(settings.threads or psutil.cpu_count(logical=False) or 1)
    if torch.get_num_interop_threads() != 1:  # can be set once a process, before the first parallel work
        torch.set_num_interop_threads(1)
    stack = _build_stack(folder, settings)
    builder = BatchBuilder(
        translator=stack.translator, page_sizes=(settings.page_size,), device=torch.device(settings.device)
    )
    info = _worker_info(folder.card, settings, stack=stack)
    return TpModelWorker(info=info, builder=builder, dispatch=RunnerDispatch((stack.runner,)))


def _build_stack(folder: ModelFolder, settings: ExecutorSettings) -> ModelStack:
    if settings.dtype not in DTYPES:
        raise UnsupportedFeature(f"dtype is {settings.dtype!r}, known: {', '.join(sorted(DTYPES))}", field="dtype")
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
        )
    )
    stack.load_weights(folder)
    stack.make_pools()
    stack.make_translator()
    stack.bind_attention()
    stack.make_runners()
    return stack


def _worker_info(card: ModelCard, settings: ExecutorSettings, *, stack: ModelStack) -> WorkerInfo:
    geometry, config = stack.pool.geometry, stack.loaded.config
    sub_pool = SubPool(
        kind=SubPoolKind.FULL,
        num_pages=geometry.num_pages,
        page_size=geometry.page_size,
        bytes_per_page=geometry.bytes_per_page,
    )
    return WorkerInfo(
        incarnation=secrets.token_bytes(INCARNATION_BYTES),
        protocol=PROTOCOL_MAX,
        features=FEATURES,
        sub_pools=(sub_pool,),
        limits=_limits(settings, context_tokens=config.context_tokens),
        logits_width=config.vocab_size,
        buckets=(),
        modes=EXECUTABLE_MODES,
        numerics=settings.numerics,
        dtype=settings.dtype,
        device=settings.device,
        model_name=card.name,
        fingerprints=Fingerprints(
            weights=card.weights_fingerprint, tokenizer=card.tokenizer_fingerprint, kv_layout=geometry.layout
        ),
        max_hidden_mode=HiddenMode.NULL,
        kernels="torch",
        version=_release(),
    )


def _limits(settings: ExecutorSettings, *, context_tokens: int) -> WorkerLimits:
    return WorkerLimits(
        max_rows=settings.max_rows,
        max_tokens=settings.max_tokens,
        max_plan_bytes=MAX_PLAN_BYTES,
        window=WINDOW,
        cached_results=CACHED_RESULTS,
        context_tokens=context_tokens,
        max_logprobs=MAX_LOGPROBS,
    )


def _release() -> str:
    for distribution in _DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return ""
