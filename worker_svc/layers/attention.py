"""The attention layer: projections, rotary embedding, and a call of the back-end."""

from dataclasses import dataclass

from torch import Tensor

from worker_svc.forward_context import ForwardContext
from worker_svc.layers.rotary import rotate
from worker_svc.numerics import Product


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Heads of one attention layer."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int


class SelfAttention:
    """Grouped-query self-attention over the KV pool."""

    def __init__(self, shape: AttentionShape, *, qkv: Product, output: Product, layer: int) -> None:
        self._shape = shape
        self._qkv = qkv
        self._output = output
        self._layer = layer

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape, owned. Writes this step's keys and values."""
        num_q, num_kv, head_dim = self._shape.num_q_heads, self._shape.num_kv_heads, self._shape.head_dim
        heads = self._qkv(hidden).view(len(hidden), num_q + 2 * num_kv, head_dim)
        turned = rotate(heads[:, : num_q + num_kv], *rotation)
        attended = context.attend(turned[:, :num_q], turned[:, num_q:], heads[:, num_q + num_kv :], layer=self._layer)
        return self._output(attended)
