"""The attention layer: projections, rotary embedding, and a call of the back-end."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.forward_context import ForwardContext
from worker_svc.kv.sub_pools import LayerPlace
from worker_svc.layers.norm import RmsNorm
from worker_svc.layers.rotary import rotate
from worker_svc.numerics import Product


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Heads of one attention layer."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Norms of each head of the queries and of the keys, before they turn. They give float32."""

    queries: RmsNorm
    keys: RmsNorm


class SelfAttention:
    """Grouped-query self-attention over the KV pool."""

    def __init__(
        self,
        shape: AttentionShape,
        *,
        qkv: Product,
        output: Product,
        place: LayerPlace,
        norms: HeadNorms | None = None,
    ) -> None:
        self._shape = shape
        self._qkv = qkv
        self._output = output
        self._place = place
        self._norms = norms

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape, owned. Writes this step's keys and values."""
        num_q, num_kv, head_dim = self._shape.num_q_heads, self._shape.num_kv_heads, self._shape.head_dim
        heads = self._qkv(hidden).view(len(hidden), num_q + 2 * num_kv, head_dim)
        turned = rotate(self._normalised(heads[:, : num_q + num_kv]), *rotation).to(heads.dtype)
        attended = context.attend(turned[:, :num_q], turned[:, num_q:], heads[:, num_q + num_kv :], place=self._place)
        return self._output(attended)

    def _normalised(self, heads: Tensor) -> Tensor:
        if self._norms is None:
            return heads
        queries, keys = heads.float().split((self._shape.num_q_heads, self._shape.num_kv_heads), dim=1)
        return torch.cat((self._norms.queries(queries), self._norms.keys(keys)), dim=1)
