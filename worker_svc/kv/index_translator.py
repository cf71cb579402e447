"""(sub-pool, page, offset) -> device slot, once per step and sub-pool.

The only place that knows where a page lies in its pool. Stores nothing between plans.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from worker_svc.kv.token_to_kv_pool import KVGeometry

Array = np.ndarray


class PagedPool(Protocol):
    """Pages of one sub-pool, whoever stores them."""

    @property
    def geometry(self) -> KVGeometry:
        """Size and layout."""
        ...


class IndexTranslator:
    """Made after the pools and before attention, which is bound to it."""

    def __init__(self, pools: Sequence[PagedPool]) -> None:
        self.pools = tuple(pools)

    def slots(self, sub_pool: int, pages: Array, offsets: Array) -> Array:
        """[n] int64 slots of the places (pages[i], offsets[i])."""
        page_size = self.pools[sub_pool].geometry.page_size
        slots: Array = np.asarray(pages, np.int64) * page_size + offsets
        return slots
