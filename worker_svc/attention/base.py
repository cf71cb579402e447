"""The attention protocol: host planning once per step, one launch per layer.

A back-end is bound to the pool it reads and writes before the first step. A captured graph that holds the attention
itself needs a plan at fixed addresses, made once for a shape and filled for each replay. Knows nothing of models.
Guards: what a slot at or past a row's length holds, NaN included, never reaches an output.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from protos.wire.enums import ForwardMode
from protos.wire.errors import InternalFault
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.token_to_kv_pool import TokenToKVPool

MetadataT = TypeVar("MetadataT")


class FixedPlan(Protocol):
    """The plan of one shape's steps, at addresses that stay. As it is made it reads and writes the sink only."""

    @property
    def metadata(self) -> Any:
        """For `run`, in the capture. The same object for the plan's life."""
        ...

    def fill(self, batch: ForwardBatch) -> None:
        """Make `batch`, padded to the shape, the step of the next replay. Before it, never inside the graph."""
        ...


class AttentionBackend(Protocol[MetadataT]):
    """Causal attention over paged KV. Made once at start; keeps nothing between steps."""

    @property
    def pool(self) -> TokenToKVPool:
        """The sub-pool it works on."""
        ...

    @property
    def parts(self) -> "Sequence[AttentionBackend[Any]]":
        """The back-ends that it calls; none unless it wraps others."""
        ...

    def plan(self, batch: ForwardBatch) -> MetadataT:
        """Everything of a step that does not depend on the layer, frozen."""
        ...

    def why_not_fixed(self, mode: ForwardMode, *, max_reqs: int) -> str | None:
        """Why steps of `mode` with up to `max_reqs` rows have no plan at fixed addresses; None if they have."""
        ...

    def fixed_plan(self, batch: ForwardBatch) -> FixedPlan:
        """Of steps of this shape and mode. `batch` is padded and lies in the sink. Other plans stay what they are.

        Raises:
            CaptureError: there is none for the shape.
        """
        ...

    def run(self, queries: Tensor, keys: Tensor, values: Tensor, *, layer: int, metadata: MetadataT) -> Tensor:
        """Store this step's keys and values, then attend.

        Args:
            queries: [num_tokens, num_q_heads, head_dim].
            keys: [num_tokens, num_kv_heads, head_dim], with rotary embedding applied.
            values: [num_tokens, num_kv_heads, head_dim].
            layer: which layer of the pool.
            metadata: of this step's batch.

        Returns:
            [num_tokens, num_q_heads * head_dim], owned. What stands there for padding tokens, nobody reads.
        """
        ...


class NothingFixed:
    """Of back-ends that plan each step anew, at addresses of its own."""

    def why_not_fixed(self, mode: ForwardMode, *, max_reqs: int) -> str | None:  # noqa: ARG002 - the protocol's
        """See `AttentionBackend.why_not_fixed`."""
        return f"{type(self).__name__} plans each step at addresses of its own"

    def fixed_plan(self, batch: ForwardBatch) -> NoReturn:  # noqa: ARG002 - the protocol's
        """See `AttentionBackend.fixed_plan`: `why_not_fixed` was not asked."""
        raise InternalFault(f"{type(self).__name__} has no plans at fixed addresses")


def with_padding(output: Tensor, *, num_tokens: int) -> Tensor:
    """`output` of the first tokens, with zeros for those behind them up to `num_tokens`; itself if there are none."""
    missing = num_tokens - len(output)
    return torch.cat((output, output.new_zeros((missing, *output.shape[1:])))) if missing else output


def reachable(backend: AttentionBackend[Any]) -> Iterator[AttentionBackend[Any]]:
    """The back-end and everything it may call, however deep."""
    yield backend
    for part in backend.parts:
        yield from reachable(part)


def verify_bound(backend: AttentionBackend[Any], translator: IndexTranslator, *, sub_pool: int = 0) -> None:
    """Refuse a back-end of which any part reads another pool than the one that write slots are translated for.

    Raises:
        InternalFault: the parts were built in the wrong order or from different pools.
    """
    for found in reachable(backend):
        if found.pool is not translator.pools[sub_pool] or found.pool.geometry.sub_pool != sub_pool:
            name = type(found).__name__
            message = f"attention back-end {name} is bound to a pool that is not the translator's sub-pool {sub_pool}"
            raise InternalFault(message)
