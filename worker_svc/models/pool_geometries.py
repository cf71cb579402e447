"""A model's shape -> the geometry of its sub-pools of KV pages, but for their numbers of pages."""

import torch

from worker_svc.kv.sub_pools import sub_pool_windows
from worker_svc.kv.token_to_kv_pool import KVGeometry
from worker_svc.models.model_config import ModelConfig


def sizeless_geometries(config: ModelConfig, *, page_size: int, dtype: torch.dtype) -> tuple[KVGeometry, ...]:
    """One for each sub-pool, the full one first, with 0 pages.

    Args:
        config: whose layers are shared out.
        page_size: tokens a page.
        dtype: of keys and values.

    Raises:
        UnsupportedFeature: windows that the sub-pools cannot hold.
    """
    return tuple(
        KVGeometry(
            num_pages=0,
            page_size=page_size,
            num_layers=config.layer_windows.count(window),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            sub_pool=index,
            window_tokens=window,
        )
        for index, window in enumerate(sub_pool_windows(config.layer_windows))
    )
