"""What layers may see of the current forward.

An explicit argument of every layer that needs it. One lives as long as its runner, so that a recorded call finds the
current step through it. Guards: reading outside a forward raises.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from protos.wire.enums import ForwardMode
from protos.wire.errors import InternalFault
from worker_svc.attention.base import AttentionBackend, FixedPlan
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.device.break_points import BreakPoints
from worker_svc.kv.sub_pools import LayerPlace


class ForwardContext:
    """The attention back-end of each sub-pool and, during a forward, its plan of the step."""

    def __init__(self, *attention: AttentionBackend[Any]) -> None:
        """One back-end for each sub-pool, in their order."""
        self.breaks = BreakPoints()
        self._attention = attention
        self._metadata: tuple[Any, ...] | None = None

    @property
    def num_sub_pools(self) -> int:
        """Back-ends."""
        return len(self._attention)

    def twin(self) -> "ForwardContext":
        """The same attention, with a current step and marks of its own: for a forward beside those of this one."""
        return ForwardContext(*self._attention)

    @contextmanager
    def bind(self, batch: ForwardBatch) -> Iterator[None]:
        """Plan attention for `batch` and make it the current step. Inside another step, which then goes on."""
        with self._bound(tuple(backend.plan(batch) for backend in self._attention)):
            yield

    def why_not_fixed(self, mode: ForwardMode, *, max_reqs: int) -> str | None:
        """Why attention has no plan at fixed addresses for such steps; see `AttentionBackend.why_not_fixed`."""
        reasons = (backend.why_not_fixed(mode, max_reqs=max_reqs) for backend in self._attention)
        return next((reason for reason in reasons if reason is not None), None)

    def fixed_plans(self, batch: ForwardBatch) -> tuple[FixedPlan, ...]:
        """One for each sub-pool, for steps of the shape of `batch`, which lies in the sink."""
        return tuple(backend.fixed_plan(batch) for backend in self._attention)

    @contextmanager
    def bind_fixed(self, plans: tuple[FixedPlan, ...]) -> Iterator[None]:
        """Make what `plans` hold the current step: for a capture, after which they are filled for each replay."""
        with self._bound(tuple(plan.metadata for plan in plans)):
            yield

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, *, place: LayerPlace) -> Tensor:
        """Store and attend in the current step, at the layer's place; see `AttentionBackend.run`. A marked call."""
        attended = self.breaks.call(self._attend, queries, keys, values, place=place)
        assert isinstance(attended, Tensor)
        return attended

    @contextmanager
    def _bound(self, metadata: tuple[Any, ...]) -> Iterator[None]:
        before, self._metadata = self._metadata, metadata
        try:
            yield
        finally:
            self._metadata = before

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, *, place: LayerPlace) -> Tensor:
        if self._metadata is None:
            raise InternalFault("attention was called outside a bound forward")
        backend, metadata = self._attention[place.sub_pool], self._metadata[place.sub_pool]
        return backend.run(queries, keys, values, layer=place.layer, metadata=metadata)
