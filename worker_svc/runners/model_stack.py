"""The device side of a worker, built in the one order that works.

Weights -> pools -> translator -> attention (bound and verified) -> runners: a later part reads an earlier one, and what
is captured may call all of them. Guards: another order raises, nothing is built twice.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import psutil
import torch

from protos.service.model_files import ModelFolder
from protos.wire.errors import InternalFault
from worker_svc.attention.base import AttentionBackend
from worker_svc.attention.choice import AttentionChoice, AttentionRequest
from worker_svc.forward_context import ForwardContext
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.sizing import PoolRequest, pool_pages
from worker_svc.kv.sub_pools import bytes_per_page_of_all
from worker_svc.kv.token_to_kv_pool import KVGeometry, TokenToKVPool
from worker_svc.model_runner import ModelRunner
from worker_svc.models.pool_geometries import pool_geometries
from worker_svc.models.registry import LoadedModel, load_model
from worker_svc.numerics import Numerics, ReproducibleNumerics
from worker_svc.runners.attention_parts import AttentionParts, AttentionSettings
from worker_svc.runners.eager import EagerRunner


class BuildStep(IntEnum):
    """What exists."""

    NOTHING = 0
    WEIGHTS = 1
    POOLS = 2
    TRANSLATOR = 3
    ATTENTION = 4
    RUNNERS = 5


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
    attention: AttentionSettings = field(default_factory=AttentionSettings)


class ModelStack:
    """Made once at start; holds the parts for the process's life."""

    loaded: LoadedModel
    pools: tuple[TokenToKVPool, ...]
    """One for each sub-pool."""
    translator: IndexTranslator
    attention: tuple[AttentionBackend[Any], ...]
    """One for each pool."""
    runner: EagerRunner

    _attention_parts: AttentionParts

    def __init__(self, settings: StackSettings) -> None:
        self._settings = settings
        self._step = BuildStep.NOTHING

    def load_weights(self, folder: ModelFolder) -> None:
        """Read the folder's weights and build its model."""
        self._enter(BuildStep.WEIGHTS)
        settings = self._settings
        self.loaded = load_model(folder, numerics=settings.numerics, dtype=settings.dtype, device=settings.device)

    def make_pools(self) -> None:
        """Reserve the KV pools in what memory the weights left, in the form that attention reads.

        Raises:
            InvalidRequest: the pool's size is too small, or more than there is.
            UnsupportedFeature: the attention back-ends that are asked for cannot work.
        """
        self._enter(BuildStep.POOLS)
        self._attention_parts = self._chosen_attention()
        sizeless = self._geometries(num_pages=0)
        pages_of_a_row = -(-self.loaded.config.context_tokens // self._settings.page_size)
        request = PoolRequest(
            kv_bytes=self._settings.kv_bytes,
            num_pages=self._settings.num_pages,
            free_bytes=free_bytes(self._settings.device),
            useful_pages=1 + self._settings.max_rows * pages_of_a_row,
        )
        cost = bytes_per_page_of_all([geometry.bytes_per_page for geometry in sizeless])
        geometries = self._geometries(num_pages=pool_pages(request, bytes_per_page=cost))
        self.pools = tuple(TokenToKVPool(geometry, device=self._settings.device) for geometry in geometries)

    def make_translator(self) -> None:
        """Make the one owner of where a page lies."""
        self._enter(BuildStep.TRANSLATOR)
        self.translator = IndexTranslator(self.pools)

    def bind_attention(self) -> None:
        """Make the attention back-ends that were chosen, on the pools that slots are translated for."""
        self._enter(BuildStep.ATTENTION)
        self.attention = self._attention_parts.bind(self.pools, self.translator)

    def make_runners(self) -> None:
        """Make the execution paths."""
        self._enter(BuildStep.RUNNERS)
        self.runner = EagerRunner(ModelRunner(self.loaded.model), ForwardContext(*self.attention))

    @property
    def attention_choice(self) -> AttentionChoice:
        """Which back-ends are used, once there are pools."""
        return self._attention_parts.choice

    def _enter(self, step: BuildStep) -> None:
        if step != self._step + 1:
            message = f"{step.name} was to be built after {BuildStep(step - 1).name}, what exists is {self._step.name}"
            raise InternalFault(message)
        self._step = step

    def _chosen_attention(self) -> AttentionParts:
        settings, config = self._settings, self.loaded.config
        return AttentionParts(
            settings.attention,
            AttentionRequest(
                prefill=settings.attention.prefill,
                decode=settings.attention.decode,
                plain=settings.attention.plain,
                reproducible=settings.numerics.name == ReproducibleNumerics.name,
                device=settings.device.type,
                dtype=settings.dtype,
                page_size=settings.page_size,
                head_dim=config.head_dim,
            ),
            num_q_heads=config.num_q_heads,
        )

    def _geometries(self, *, num_pages: int) -> tuple[KVGeometry, ...]:
        """Of every sub-pool; `num_pages` of the full one."""
        choice = self.attention_choice
        return pool_geometries(
            self.loaded.config,
            num_pages=num_pages,
            page_size=self._settings.page_size,
            dtype=choice.kv_dtype,
            order=choice.order,
        )


def free_bytes(device: torch.device) -> int:
    """Memory of the device that nobody uses now."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    return int(torch.cuda.mem_get_info(device)[0])
