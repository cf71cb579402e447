"""What layers may see of the current forward.

An explicit argument of every layer that needs it. One lives as long as its runner, so that a recorded call finds the
current step through it. Guards: reading outside a forward raises.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from protos.wire.errors import InternalFault
from worker_svc.attention.base import AttentionBackend
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.device.break_points import BreakPoints


class ForwardContext:
    """The attention back-end and, during a forward, its plan of the step."""

    def __init__(self, attention: AttentionBackend[Any]) -> None:
        self.breaks = BreakPoints()
        self._attention = attention
        self._metadata: Any = None

    @contextmanager
    def bind(self, batch: ForwardBatch) -> Iterator[None]:
        """Plan attention for `batch` and make it the current step. Inside another step, which then goes on."""
        before, self._metadata = self._metadata, self._attention.plan(batch)
        try:
            yield
        finally:
            self._metadata = before

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, *, layer: int) -> Tensor:
        """Store and attend in the current step; see `AttentionBackend.run`. A marked call."""
        attended = self.breaks.call(self._attend, queries, keys, values, layer=layer)
        assert isinstance(attended, Tensor)
        return attended

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, *, layer: int) -> Tensor:
        if self._metadata is None:
            raise InternalFault("attention was called outside a bound forward")
        return self._attention.run(queries, keys, values, layer=layer, metadata=self._metadata)
