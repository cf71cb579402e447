"""Builds a simulated executor from a model's card and settings. Opens no tensors."""

import secrets
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from protos.service.model_files import ModelCard
from protos.service.step_times import FixedStep, read_step_times
from protos.wire.enums import Feature, HiddenMode, SubPoolKind
from protos.wire.errors import InvalidRequest
from protos.wire.limits import INCARNATION_BYTES, MAX_LOGPROBS, MAX_PLAN_BYTES, PROTOCOL_MAX
from protos.wire.simulated_tokens import SimulatedVocabulary
from protos.wire.worker_info import Fingerprints, SubPool, WorkerInfo, WorkerLimits
from worker_svc.batch.forward_mode import EXECUTABLE_MODES
from worker_svc.simulated.device_clock import StepPacer, SystemClock
from worker_svc.simulated.executor import SimulatedExecutor, StepCost
from worker_svc.simulated.kv_chains import ChainPool, PoolShape

FEATURES = frozenset(
    {
        Feature.TOKEN_REFERENCES,
        Feature.OUTPUT_LOGPROBS,
        Feature.PENALTIES,
        Feature.MASKS,
        Feature.LOGIT_BIAS,
        Feature.DELTAS,
    }
)
NUMERICS = "simulated"
DEVICE = "simulated"
DEFAULT_TABLE = Path(__file__).parent / "step_times_h100_8b.toml"
DTYPE = "bfloat16"
MIN_PAGES = 2
"""The sink and one page."""
MAX_SLOTS = 1 << 28
"""A slot takes 8 bytes of this machine's memory."""
_CACHED_RESULTS = 4
_DISTRIBUTIONS = ("forwardplane-worker", "forwardplane")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSettings:
    """What the device is like. Made by the composition root and by tests."""

    step_times: Path | None = None
    """Table; None: the default one."""
    step_ms: float | None = None
    """Every step takes this long, in place of a table's time."""
    num_pages: int | None = None
    """None: what the memory gives."""
    kv_bytes: int | None = None
    """Of the simulated device; None: the table's."""
    page_size: int = 16
    max_rows: int = 256
    max_tokens: int = 2048
    window: int = 2
    eos_ratio: float = 0.0
    checks_pages: bool = True


def build_simulated_executor(card: ModelCard, settings: SimulatedSettings) -> SimulatedExecutor:
    """A worker ready for plans, with a new incarnation.

    Raises:
        InvalidRequest: the table or the pool's size cannot be used.
    """
    table = read_step_times(settings.step_times or DEFAULT_TABLE, field="simulated_steps")
    cost: StepCost = table if settings.step_ms is None else FixedStep(settings.step_ms)
    page_bytes = settings.page_size * table.kv_bytes_per_token
    num_pages = settings.num_pages or (settings.kv_bytes or table.kv_bytes) // page_bytes
    _check_pages(num_pages, settings)
    info = _worker_info(card, settings, num_pages=num_pages, page_bytes=page_bytes)
    return SimulatedExecutor(
        info=info,
        cost=cost,
        pool=ChainPool(
            PoolShape(num_pages=num_pages, page_size=settings.page_size), checks_pages=settings.checks_pages
        ),
        vocabulary=SimulatedVocabulary(card.vocab_size, card.eos_token_ids, settings.eos_ratio),
        pacer=StepPacer(SystemClock()),
    )


def _check_pages(num_pages: int, settings: SimulatedSettings) -> None:
    most = MAX_SLOTS // settings.page_size
    if not MIN_PAGES <= num_pages <= most:
        message = f"the simulated KV pool would have {num_pages} pages, allowed are {MIN_PAGES} to {most}"
        raise InvalidRequest(message, field="num_pages")


def _worker_info(card: ModelCard, settings: SimulatedSettings, *, num_pages: int, page_bytes: int) -> WorkerInfo:
    sub_pool = SubPool(
        kind=SubPoolKind.FULL, num_pages=num_pages, page_size=settings.page_size, bytes_per_page=page_bytes
    )
    return WorkerInfo(
        incarnation=secrets.token_bytes(INCARNATION_BYTES),
        protocol=PROTOCOL_MAX,
        features=FEATURES,
        sub_pools=(sub_pool,),
        limits=WorkerLimits(
            max_rows=settings.max_rows,
            max_tokens=settings.max_tokens,
            max_plan_bytes=MAX_PLAN_BYTES,
            window=settings.window,
            cached_results=max(_CACHED_RESULTS, settings.window + 2),
            context_tokens=card.context_tokens,
            max_logprobs=MAX_LOGPROBS,
        ),
        logits_width=card.vocab_size,
        buckets=(),
        modes=EXECUTABLE_MODES,
        numerics=NUMERICS,
        dtype=DTYPE,
        device=DEVICE,
        model_name=card.name,
        fingerprints=Fingerprints(
            weights=card.weights_fingerprint,
            tokenizer=card.tokenizer_fingerprint,
            kv_layout=f"chains.page{settings.page_size}",
        ),
        max_hidden_mode=HiddenMode.NULL,
        kernels="none",
        version=_release(),
    )


def _release() -> str:
    for distribution in _DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return ""
