"""The attention of a stack: chosen before its pools are made, since they take the form it reads; bound after.

A back-end that `auto` passes over is logged with its reason.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kernels.native import ThreadPool
from worker_svc.attention.base import AttentionBackend, verify_bound
from worker_svc.attention.choice import AttentionRequest, choose_attention
from worker_svc.attention.machine import attention_machine
from worker_svc.attention.registry import AttentionTools, attention_pair
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.token_to_kv_pool import TokenToKVPool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSettings:
    """Which attention back-ends are wanted."""

    prefill: str = "auto"
    decode: str = "auto"
    plain: bool = False
    """`auto` means torch."""
    threads: int = 1
    """Of a back-end that has its own."""


class AttentionParts:
    """Made when the model is known; holds what its back-ends share."""

    def __init__(self, settings: AttentionSettings, request: AttentionRequest, *, num_q_heads: int) -> None:
        """Raises UnsupportedFeature when what is asked for cannot work."""
        machine = attention_machine(request.possible())
        self.choice = choose_attention(request, machine.absent)
        for reason in self.choice.reasons:
            logger.warning("attention back-end passed over", extra={"why": reason})
        native = machine.native if self.choice.uses("native") else None
        self._tools = AttentionTools(
            num_q_heads=num_q_heads,
            dtype=request.dtype,
            threads=None if native is None else ThreadPool(native, threads=settings.threads),
            flashinfer=machine.flashinfer,
        )

    def bind(self, pools: Sequence[TokenToKVPool], translator: IndexTranslator) -> tuple[AttentionBackend[Any], ...]:
        """The back-end of each sub-pool, verified.

        Raises:
            InternalFault: the pools are not those that slots are translated for.
        """
        backends = tuple(attention_pair(self.choice.prefill, self.choice.decode, pool, self._tools) for pool in pools)
        for index, backend in enumerate(backends):
            verify_bound(backend, translator, sub_pool=index)
        return backends
