"""A model's shape -> the geometry of its sub-pools of KV pages."""

import torch

from kernels.native_types import PAGE_SIZE
from protos.service.model_config import ModelConfig
from worker_svc.kv.kv_order import KVOrder
from worker_svc.kv.sizing import window_pages
from worker_svc.kv.sub_pools import layer_places, sub_pool_windows
from worker_svc.kv.token_to_kv_pool import KVGeometry


def pool_geometries(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    order: KVOrder = KVOrder.HEADS,
) -> tuple[KVGeometry, ...]:
    """One for each sub-pool, the full one first.

    Args:
        config: whose layers are shared out.
        num_pages: of the full sub-pool.
        page_size: tokens a page.
        dtype: of keys and values.
        order: of the elements in memory.

    Raises:
        UnsupportedFeature: windows that the sub-pools cannot hold.
    """
    windows, places = sub_pool_windows(config.layer_windows), layer_places(config.layer_windows)
    seen_tokens = config.layer_windows[0] if len(windows) == 1 else 0
    return tuple(
        KVGeometry(
            num_pages=window_pages(num_pages) if window else num_pages,
            page_size=page_size,
            num_layers=sum(place.sub_pool == index for place in places),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            sub_pool=index,
            window_tokens=window,
            seen_tokens=seen_tokens,
            order=order,
        )
        for index, window in enumerate(windows)
    )


def native_geometries(config: ModelConfig) -> tuple[KVGeometry, ...]:
    """Every sub-pool as the native kernels lay it out, with no number of pages yet."""
    return pool_geometries(config, num_pages=0, page_size=PAGE_SIZE, dtype=torch.float16, order=KVOrder.NATIVE)
