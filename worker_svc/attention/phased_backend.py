"""Prefill and decode attended by different back-ends of one pool: one writes what the other reads.

Guards: the two share a pool, so that a step's keys and values are where the next step looks for them.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from protos.wire.enums import ForwardMode
from protos.wire.errors import InternalFault
from worker_svc.attention.base import AttentionBackend, FixedPlan
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.batch.forward_mode import traits_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PhasedMetadata:
    """One step's plan and who made it. Lives until the step's forward is done."""

    backend: AttentionBackend[Any]
    inner: Any


class PhasedFixedPlan:
    """See `FixedPlan`."""

    def __init__(self, backend: AttentionBackend[Any], plan: FixedPlan) -> None:
        self.metadata = PhasedMetadata(backend=backend, inner=plan.metadata)
        self._plan = plan

    def fill(self, batch: ForwardBatch) -> None:
        """See `FixedPlan.fill`."""
        self._plan.fill(batch)


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
        backend = self._of(batch.forward_mode)
        return PhasedMetadata(backend=backend, inner=backend.plan(batch))

    def why_not_fixed(self, mode: ForwardMode, *, max_reqs: int) -> str | None:
        """See `AttentionBackend.why_not_fixed`."""
        return self._of(mode).why_not_fixed(mode, max_reqs=max_reqs)

    def fixed_plan(self, batch: ForwardBatch) -> "PhasedFixedPlan":
        """See `AttentionBackend.fixed_plan`."""
        backend = self._of(batch.forward_mode)
        return PhasedFixedPlan(backend, backend.fixed_plan(batch))

    def run(self, queries: Tensor, keys: Tensor, values: Tensor, *, layer: int, metadata: PhasedMetadata) -> Tensor:
        """See `AttentionBackend.run`."""
        return metadata.backend.run(queries, keys, values, layer=layer, metadata=metadata.inner)

    def _of(self, mode: ForwardMode) -> AttentionBackend[Any]:
        return self._decode if traits_of(mode).is_decode_or_idle else self._prefill
