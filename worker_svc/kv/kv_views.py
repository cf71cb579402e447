"""How a pool of every order is shaped, and read through one view.

An attention back-end that reads pages in place wants its own order; back-ends that gather work on any. Knows nothing of
who the pages belong to.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from worker_svc.kv.kv_order import KVOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
    """What a layer's pages hold."""

    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class _Order:
    shape: Callable[[PageShape], tuple[int, ...]]
    views: Callable[[Tensor, PageShape], tuple[Tensor, Tensor]]


def _native_views(layer: Tensor, shape: PageShape) -> tuple[Tensor, Tensor]:
    keys = layer[:, :, 0].unflatten(-1, (shape.head_dim, shape.page_size)).permute(1, 0, 3, 2)
    values = layer[:, :, 1].unflatten(-1, (shape.page_size, shape.head_dim)).permute(1, 0, 2, 3)
    return keys, values


_ORDERS: Mapping[KVOrder, _Order] = MappingProxyType(
    {
        KVOrder.HEADS: _Order(
            lambda of: (2, of.num_kv_heads, of.num_pages, of.page_size, of.head_dim),
            lambda layer, _: (layer[0], layer[1]),
        ),
        KVOrder.NATIVE: _Order(
            lambda of: (of.num_pages, of.num_kv_heads, 2, of.page_size * of.head_dim), _native_views
        ),
        KVOrder.NHD: _Order(
            lambda of: (of.num_pages, 2, of.page_size, of.num_kv_heads, of.head_dim),
            lambda layer, _: (layer[:, 0].permute(2, 0, 1, 3), layer[:, 1].permute(2, 0, 1, 3)),
        ),
        KVOrder.HND: _Order(
            lambda of: (of.num_pages, 2, of.num_kv_heads, of.page_size, of.head_dim),
            lambda layer, _: (layer[:, 0].permute(1, 0, 2, 3), layer[:, 1].permute(1, 0, 2, 3)),
        ),
    }
)


def layer_shape(order: KVOrder, shape: PageShape) -> tuple[int, ...]:
    """Shape of the buffer of one layer."""
    return _ORDERS[order].shape(shape)


def head_views(order: KVOrder, layer: Tensor, shape: PageShape) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer's buffer, both [num_kv_heads, num_pages, page_size, head_dim], the buffer itself."""
    return _ORDERS[order].views(layer, shape)
