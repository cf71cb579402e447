"""Builds a TpModelWorker from a model folder, for the composition root and for tests.

Says what the worker offers (`WorkerInfo`) from the parts it was built of, so that page size, pool size, limits and
features exist once.
"""

import secrets
from importlib.metadata import PackageNotFoundError, version

import torch

from protos.service.model_files import ModelCard, ModelFolder
from protos.wire.enums import Feature, HiddenMode, SubPoolKind
from protos.wire.limits import INCARNATION_BYTES, MAX_HIDDEN_BYTES, MAX_LOGPROBS, MAX_PLAN_BYTES, PROTOCOL_MAX
from protos.wire.worker_info import Fingerprints, SubPool, WorkerInfo, WorkerLimits
from worker_svc.batch.forward_mode import EXECUTABLE_MODES
from worker_svc.batch.staging import PlanStaging
from worker_svc.device.cuda_copies import transfers_of
from worker_svc.device.memory import DeviceMemory
from worker_svc.kv.token_to_kv_pool import KVGeometry
from worker_svc.runners.device_side import DeviceSide, device_side
from worker_svc.runners.executor_settings import ExecutorSettings, HiddenSettings, executor_settings
from worker_svc.tp_model_worker import TpModelWorker

__all__ = ["ExecutorSettings", "HiddenSettings", "build_tp_model_worker", "executor_settings"]

FEATURES = frozenset(
    {
        Feature.TOKEN_REFERENCES,
        Feature.OUTPUT_LOGPROBS,
        Feature.PROMPT_LOGPROBS,
        Feature.HIDDEN_STATES,
        Feature.PENALTIES,
        Feature.MASKS,
        Feature.LOGIT_BIAS,
        Feature.DELTAS,
    }
)
"""What is executed beyond the plain plan."""
CACHED_RESULTS = 4
_DEFAULT_HIDDEN = HiddenSettings()
_DISTRIBUTIONS = ("forwardplane-worker", "forwardplane")


def build_tp_model_worker(
    folder: ModelFolder, settings: ExecutorSettings, *, hidden: HiddenSettings = _DEFAULT_HIDDEN
) -> TpModelWorker:
    """A worker ready for plans, with a new incarnation. Sets torch's thread count, which is one per process.

    Raises:
        InvalidModelFile: the weights are damaged or not the folder's.
        UnsupportedFeature: an unknown numerics, dtype or architecture, or a combination that cannot work.
        InvalidRequest: the KV pool's size cannot be had.
    """
    if torch.get_num_interop_threads() != 1:  # can be set once a process, before the first parallel work
        torch.set_num_interop_threads(1)
    side = device_side(folder, settings)
    max_hidden_mode = HiddenMode[hidden.max_hidden_mode.upper()]
    info = _worker_info(folder.card, settings, side=side, max_hidden_mode=max_hidden_mode)
    staging = PlanStaging(
        info=info,
        translator=side.translator,
        device=torch.device(settings.device),
        hidden_mode=HiddenMode[hidden.capture_hidden_mode.upper()],
        transfers=transfers_of(torch.device(settings.device), num_slots=info.limits.window),
    )
    paths = side.paths
    return TpModelWorker(
        info=info,
        staging=staging,
        dispatch=paths.dispatch,
        canary=side.canary,
        captures=paths.captures,
        memory=DeviceMemory(torch.device(settings.device), weights_bytes=side.weights_bytes),
    )


def _worker_info(
    card: ModelCard, settings: ExecutorSettings, *, side: DeviceSide, max_hidden_mode: HiddenMode
) -> WorkerInfo:
    geometries, config = side.geometries, side.config
    kv_layout = "+".join(geometry.layout for geometry in geometries)
    return WorkerInfo(
        incarnation=secrets.token_bytes(INCARNATION_BYTES),
        protocol=PROTOCOL_MAX,
        features=_features(side),
        sub_pools=tuple(_sub_pool(geometry) for geometry in geometries),
        limits=_limits(settings, geometries[0], side=side),
        logits_width=config.vocab_size,
        buckets=() if side.paths.captures is None else side.paths.captures.progress.buckets,
        modes=EXECUTABLE_MODES,
        numerics=settings.numerics,
        dtype=settings.dtype,
        device=settings.device,
        model_name=card.name,
        fingerprints=Fingerprints(
            weights=card.weights_fingerprint, tokenizer=card.tokenizer_fingerprint, kv_layout=kv_layout
        ),
        max_hidden_mode=max_hidden_mode,
        kernels=side.kernels,
        version=_release(),
    )


def _features(side: DeviceSide) -> frozenset[Feature]:
    found = set(FEATURES)
    if side.canary is not None:
        found.add(Feature.CANARY)
    if side.paths.captures is not None:
        found.add(Feature.GRAPHS)
    if any(geometry.window_tokens for geometry in side.geometries):
        found.add(Feature.WINDOW_SUB_POOL)
    return frozenset(found)


def _sub_pool(geometry: KVGeometry) -> SubPool:
    return SubPool(
        kind=SubPoolKind.WINDOW if geometry.window_tokens else SubPoolKind.FULL,
        num_pages=geometry.num_pages,
        page_size=geometry.page_size,
        bytes_per_page=geometry.bytes_per_page,
        window_tokens=geometry.window_tokens,
    )


def _limits(settings: ExecutorSettings, geometry: KVGeometry, *, side: DeviceSide) -> WorkerLimits:
    """`geometry`: of the full sub-pool."""
    context_tokens = side.config.context_tokens
    return WorkerLimits(
        max_rows=geometry.running_limit(context_tokens=context_tokens, asked=settings.max_rows),
        max_tokens=settings.max_tokens,
        max_plan_bytes=MAX_PLAN_BYTES,
        window=settings.window,
        cached_results=max(CACHED_RESULTS, settings.window + 2),
        context_tokens=context_tokens,
        max_logprobs=MAX_LOGPROBS,
        max_hidden_states=MAX_HIDDEN_BYTES // side.state_bytes,
    )


def _release() -> str:
    for distribution in _DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return ""
