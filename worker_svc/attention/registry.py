"""Name -> attention back-end, at start."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from protos.wire.errors import UnsupportedFeature
from worker_svc.attention.base import AttentionBackend
from worker_svc.attention.tiled_backend import TiledAttention
from worker_svc.attention.torch_backend import TorchAttention
from worker_svc.kv.token_to_kv_pool import TokenToKVPool

BACKENDS: Mapping[str, Callable[[TokenToKVPool], AttentionBackend[Any]]] = MappingProxyType(
    {"tiled": TiledAttention, "torch": TorchAttention}
)


def attention_backend(name: str, pool: TokenToKVPool) -> AttentionBackend[Any]:
    """The back-end of that name, on `pool`.

    Raises:
        UnsupportedFeature: no such back-end; lists those there are.
    """
    if name not in BACKENDS:
        raise UnsupportedFeature(f"attention is {name!r}, known: {', '.join(sorted(BACKENDS))}", field="attention")
    return BACKENDS[name](pool)
