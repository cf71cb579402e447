"""Name -> attention back-end, at start."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from kernels.native import ThreadPool
from protos.wire.errors import InternalFault, UnsupportedFeature
from worker_svc.attention.base import AttentionBackend
from worker_svc.attention.flashinfer_backend import FlashInferAttention
from worker_svc.attention.flashinfer_wrappers import FlashInfer
from worker_svc.attention.native_backend import NativeAttention
from worker_svc.attention.phased_backend import PhasedAttention
from worker_svc.attention.tiled_backend import TiledAttention
from worker_svc.attention.torch_backend import TorchAttention
from worker_svc.kv.token_to_kv_pool import TokenToKVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTools:
    """What some back-ends need beside their pool."""

    num_q_heads: int
    dtype: torch.dtype
    """Of queries, keys and values."""
    threads: ThreadPool | None = None
    """Of the native library."""
    flashinfer: FlashInfer | None = None
    context_tokens: int | None = None
    """Of the longest sequence. None: only the pool limits it."""


def _native(pool: TokenToKVPool, tools: AttentionTools | None) -> NativeAttention:
    if tools is None or tools.threads is None:
        raise InternalFault("native attention was chosen without a pool of native threads")
    return NativeAttention(pool, threads=tools.threads)


def _flashinfer(pool: TokenToKVPool, tools: AttentionTools | None) -> FlashInferAttention:
    if tools is None or tools.flashinfer is None:
        raise InternalFault("flashinfer attention was chosen without its package")
    return FlashInferAttention(
        pool,
        tools.flashinfer,
        num_q_heads=tools.num_q_heads,
        dtype=tools.dtype,
        context_tokens=tools.context_tokens,
    )


def _torch(pool: TokenToKVPool, tools: AttentionTools | None) -> TorchAttention:
    return TorchAttention(pool, context_tokens=None if tools is None else tools.context_tokens)


BACKENDS: Mapping[str, Callable[[TokenToKVPool, AttentionTools | None], AttentionBackend[Any]]] = MappingProxyType(
    {
        "flashinfer": _flashinfer,
        "native": _native,
        "tiled": lambda pool, _: TiledAttention(pool),
        "torch": _torch,
    }
)


def attention_backend(name: str, pool: TokenToKVPool, tools: AttentionTools | None = None) -> AttentionBackend[Any]:
    """The back-end of that name, on `pool`.

    Raises:
        UnsupportedFeature: no such back-end; lists those there are.
    """
    if name not in BACKENDS:
        raise UnsupportedFeature(f"attention is {name!r}, known: {', '.join(sorted(BACKENDS))}", field="attention")
    return BACKENDS[name](pool, tools)


def attention_pair(
    prefill: str, decode: str, pool: TokenToKVPool, tools: AttentionTools | None = None
) -> AttentionBackend[Any]:
    """One back-end for prefill and one for decode, on `pool`; the back-end itself where they are the same.

    Raises:
        UnsupportedFeature: no such back-end; lists those there are.
    """
    if prefill == decode:
        return attention_backend(prefill, pool, tools)
    return PhasedAttention(
        prefill=attention_backend(prefill, pool, tools), decode=attention_backend(decode, pool, tools)
    )
