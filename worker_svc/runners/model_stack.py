"""The device side of a worker, built in the one order that works.

Weights -> pools -> translator -> attention (bound and verified) -> runners: a later part reads an earlier one, and what
is captured may call all of them. Guards: another order raises, nothing is built twice.
"""

import logging
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import psutil
import torch

from kernels.native import ThreadPool
from protos.service.model_files import ModelFolder
from protos.wire.errors import InternalFault
from worker_svc.attention.base import AttentionBackend, verify_bound
from worker_svc.attention.choice import AttentionChoice, AttentionRequest, choose_attention
from worker_svc.attention.machine import AttentionMachine, attention_machine
from worker_svc.attention.registry import AttentionTools, attention_pair
from worker_svc.forward_context import ForwardContext
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.sizing import PoolRequest, pool_pages
from worker_svc.kv.token_to_kv_pool import KVGeometry, TokenToKVPool
from worker_svc.model_runner import ModelRunner
from worker_svc.models.registry import LoadedModel, load_model
from worker_svc.numerics import Numerics, ReproducibleNumerics
from worker_svc.runners.eager import EagerRunner

logger = logging.getLogger(__name__)


class BuildStep(IntEnum):
    """What exists."""

    NOTHING = 0
    WEIGHTS = 1
    POOLS = 2
    TRANSLATOR = 3
    ATTENTION = 4
    RUNNERS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSettings:
    """Which attention back-ends are wanted."""

    prefill: str = "auto"
    decode: str = "auto"
    plain: bool = False
    """`auto` means torch."""
    threads: int = 1
    """Of a back-end that has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """What the parts are built for."""

    numerics: Numerics
    dtype: torch.dtype
    device: torch.device
    page_size: int
    max_rows: int
    kv_bytes: int | None
    """Neither this nor `num_pages`: a share of the free memory."""
    num_pages: int | None
    attention: AttentionSettings = AttentionSettings()


class ModelStack:
    """Made once at start; holds the parts for the process's life."""

    loaded: LoadedModel
    pool: TokenToKVPool
    translator: IndexTranslator
    attention_choice: AttentionChoice
    attention: AttentionBackend[Any]
    runner: EagerRunner

    _machine: AttentionMachine

    def __init__(self, settings: StackSettings) -> None:
        self._settings = settings
        self._step = BuildStep.NOTHING

    def load_weights(self, folder: ModelFolder) -> None:
        """Read the folder's weights and build its model."""
        self._enter(BuildStep.WEIGHTS)
        settings = self._settings
        self.loaded = load_model(folder, numerics=settings.numerics, dtype=settings.dtype, device=settings.device)

    def make_pools(self) -> None:
        """Reserve the KV pool in what memory the weights left, in the form that attention reads.

        Raises:
            InvalidRequest: the pool's size is too small, or more than there is.
            UnsupportedFeature: the attention back-ends that are asked for cannot work.
        """
        self._enter(BuildStep.POOLS)
        self._choose_attention()
        sizeless = self._geometry(num_pages=0)
        pages_of_a_row = -(-self.loaded.config.context_tokens // self._settings.page_size)
        request = PoolRequest(
            kv_bytes=self._settings.kv_bytes,
            num_pages=self._settings.num_pages,
            free_bytes=free_bytes(self._settings.device),
            useful_pages=1 + self._settings.max_rows * pages_of_a_row,
        )
        num_pages = pool_pages(request, bytes_per_page=sizeless.bytes_per_page)
        self.pool = TokenToKVPool(self._geometry(num_pages=num_pages), device=self._settings.device)

    def make_translator(self) -> None:
        """Make the one owner of where a page lies."""
        self._enter(BuildStep.TRANSLATOR)
        self.translator = IndexTranslator((self.pool,))

    def bind_attention(self) -> None:
        """Make the attention back-ends that were chosen, on the pool that slots are translated for."""
        self._enter(BuildStep.ATTENTION)
        native, choice = self._machine.native, self.attention_choice
        count = self._settings.attention.threads
        tools = AttentionTools(
            num_q_heads=self.loaded.config.num_q_heads,
            dtype=self._settings.dtype,
            threads=ThreadPool(native, threads=count) if native and choice.uses("native") else None,
            flashinfer=self._machine.flashinfer,
        )
        self.attention = attention_pair(choice.prefill, choice.decode, self.pool, tools)
        verify_bound(self.attention, self.translator)

    def make_runners(self) -> None:
        """Make the execution paths."""
        self._enter(BuildStep.RUNNERS)
        self.runner = EagerRunner(ModelRunner(self.loaded.model), ForwardContext(self.attention))

    def _enter(self, step: BuildStep) -> None:
        if step != self._step + 1:
            message = f"{step.name} was to be built after {BuildStep(step - 1).name}, what exists is {self._step.name}"
            raise InternalFault(message)
        self._step = step

    def _choose_attention(self) -> None:
        settings = self._settings
        request = AttentionRequest(
            prefill=settings.attention.prefill,
            decode=settings.attention.decode,
            reproducible=settings.numerics.name == ReproducibleNumerics.name,
            plain=settings.attention.plain,
            device=settings.device.type,
            dtype=settings.dtype,
            page_size=settings.page_size,
            head_dim=self.loaded.config.head_dim,
        )
        self._machine = attention_machine(request.possible())
        self.attention_choice = choose_attention(request, self._machine.absent)
        for reason in self.attention_choice.reasons:
            logger.warning("attention back-end passed over", extra={"why": reason})

    def _geometry(self, *, num_pages: int) -> KVGeometry:
        config, choice = self.loaded.config, self.attention_choice
        return KVGeometry(
            num_pages=num_pages,
            page_size=self._settings.page_size,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=choice.kv_dtype,
            order=choice.order,
        )


def free_bytes(device: torch.device) -> int:
    """Memory of the device that nobody uses now."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    return int(torch.cuda.mem_get_info(device)[0])
