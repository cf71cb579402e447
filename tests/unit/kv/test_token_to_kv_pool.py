import torch

from worker_svc.kv.token_to_kv_pool import KVGeometry, TokenToKVPool

GEOMETRY = KVGeometry(num_pages=3, page_size=4, num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float32)


def test_a_slot_is_a_place_in_a_page_of_every_head():
    pool = TokenToKVPool(GEOMETRY, device=torch.device("cpu"))
    for layer in range(GEOMETRY.num_layers):
        pool.keys(layer).zero_()
    keys, values = torch.randn(2, 2, 8), torch.randn(2, 2, 8)

    pool.write(1, slots=torch.tensor([9, 4]), keys=keys, values=values)

    assert torch.equal(pool.keys(1)[:, 2, 1], keys[0])
    assert torch.equal(pool.values(1)[:, 1, 0], values[1])
    assert pool.keys(0).count_nonzero() == 0
    assert pool.keys(1).count_nonzero() == keys.numel()
    assert pool.num_slots == 12


def test_sizes_and_layout():
    assert GEOMETRY.bytes_per_page == 2 * 2 * 2 * 4 * 8 * 4
    assert GEOMETRY.layout == "layers2.heads2.dim8.page4.float32"
