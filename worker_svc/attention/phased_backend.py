"""Prefill and decode attended by different back-ends of one pool: one writes what the other reads.

Guards: the two share a pool, so that a step's keys and values are where the next step looks for them.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from protos.wire.errors import InternalFault
from worker_svc.attention.base import AttentionBackend
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.batch.forward_mode import traits_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PhasedMetadata:
    """One step's plan and who made it. Lives until the step's forward is done."""

    backend: AttentionBackend[Any]
    inner: Any


class PhasedAttention:
    """Decode and idle steps go to one back-end, every other step to the other."""

    def __init__(self, *, prefill: AttentionBackend[Any], decode: AttentionBackend[Any]) -> None:
        """Raises InternalFault when the two are bound to different pools."""
        if prefill.pool is not decode.pool:
            raise InternalFault("prefill and decode attention are bound to different pools")
        self.pool = prefill.pool
        self.parts = (prefill, decode)
        self._prefill = prefill
        self._decode = decode

    def plan(self, batch: ForwardBatch) -> PhasedMetadata:
        """Choose by the batch's mode, and let the chosen one plan."""
        backend = self._decode if traits_of(batch.forward_mode).is_decode_or_idle else self._prefill
        return PhasedMetadata(backend=backend, inner=backend.plan(batch))

    def run(self, queries: Tensor, keys: Tensor, values: Tensor, *, layer: int, metadata: PhasedMetadata) -> Tensor:
        """See `AttentionBackend.run`."""
        return metadata.backend.run(queries, keys, values, layer=layer, metadata=metadata.inner)
