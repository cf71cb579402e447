import numpy as np
import torch

from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.token_to_kv_pool import KVGeometry, TokenToKVPool


def pool(page_size: int) -> TokenToKVPool:
    geometry = KVGeometry(
        num_pages=4, page_size=page_size, num_layers=1, num_kv_heads=1, head_dim=2, dtype=torch.float32
    )
    return TokenToKVPool(geometry, device=torch.device("cpu"))


def test_each_sub_pool_has_its_own_page_size():
    translator = IndexTranslator((pool(16), pool(4)))
    pages, offsets = np.array([0, 1, 3], np.int32), np.array([0, 2, 3])

    assert translator.slots(0, pages, offsets).tolist() == [0, 18, 51]
    assert translator.slots(1, pages, offsets).tolist() == [0, 6, 15]
    assert translator.slots(0, pages, offsets).dtype == np.int64


def test_large_pools_do_not_overflow():
    slots = IndexTranslator((pool(16),)).slots(0, np.array([2**30], np.int32), np.array([15]))
    assert slots.tolist() == [2**34 + 15]
