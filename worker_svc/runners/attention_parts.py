"""The attention of a stack: chosen before its pools are made, since they take the form it reads; bound after.

A back-end that `auto` passes over is logged with its reason.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from kernels.native import ThreadPool
from protos.service.model_config import ModelConfig
from worker_svc.attention.base import AttentionBackend, verify_bound
from worker_svc.attention.choice import choose_attention
from worker_svc.attention.machine import attention_machine
from worker_svc.attention.registry import AttentionTools, attention_pair
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.token_to_kv_pool import KVGeometry, TokenToKVPool
from worker_svc.models.pool_geometries import pool_geometries
from worker_svc.numerics import DTYPES
from worker_svc.runners.attention_rules import attention_request
from worker_svc.runners.executor_settings import ExecutorSettings

logger = logging.getLogger(__name__)


class AttentionParts:
    """Made when the model is known; holds what its back-ends share."""

    def __init__(self, settings: ExecutorSettings, config: ModelConfig, *, threads: int) -> None:
        """Raises UnsupportedFeature when what the settings ask for cannot work."""
        request = attention_request(settings, head_dim=config.head_dim)
        machine = attention_machine(request.possible())
        self.choice = choose_attention(request, machine.absent)
        for reason in self.choice.reasons:
            logger.warning("attention back-end passed over", extra={"why": reason})
        native = machine.native if self.choice.uses("native") else None
        self._tools = AttentionTools(
            num_q_heads=config.num_q_heads,
            dtype=DTYPES[settings.dtype],
            threads=None if native is None else ThreadPool(native, threads=threads),
            flashinfer=machine.flashinfer,
            context_tokens=config.context_tokens,
        )

    def sizeless(self, config: ModelConfig, *, page_size: int) -> tuple[KVGeometry, ...]:
        """Every sub-pool in the form that attention reads, with no number of pages yet."""
        dtype = getattr(torch, self.choice.kv_dtype)
        return pool_geometries(config, num_pages=0, page_size=page_size, dtype=dtype, order=self.choice.order)

    def describe(self) -> str:
        """For people: what computes."""
        is_plain = {self.choice.prefill, self.choice.decode} <= {"torch", "tiled"}
        return "torch" if is_plain else f"torch, {self.choice.describe()}"

    def bind(self, pools: Sequence[TokenToKVPool], translator: IndexTranslator) -> tuple[AttentionBackend[Any], ...]:
        """The back-end of each sub-pool, verified.

        Raises:
            InternalFault: the pools are not those that slots are translated for.
        """
        backends = tuple(attention_pair(self.choice.prefill, self.choice.decode, pool, self._tools) for pool in pools)
        for index, backend in enumerate(backends):
            verify_bound(backend, translator, sub_pool=index)
        return backends
