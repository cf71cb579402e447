import logging

import pytest
import torch

from kernels.reference.index_ops import write_kv
from tests.support.attention_cases import make_pool
from worker_svc.device import kv_writer as chosen
from worker_svc.kv.kv_order import KVOrder


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("order", KVOrder)
def test_torch_writes_what_the_reference_writes(order, dtype):
    known, found = (make_pool(7.0, order=order, dtype=dtype) for _ in range(2))
    source = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([0, 16, 1279, 500])
    write_kv(source, slots, known.keys(1))
    chosen.write_with_torch(source, slots, found.keys(1))
    assert torch.equal(found.keys(1)[:, 1:], known.keys(1)[:, 1:])


def test_the_cpu_has_torch_and_a_gpu_has_triton_or_hears_that_it_is_missing(monkeypatch, caplog):
    assert chosen.kv_writer(torch.device("cpu")) is chosen.write_with_torch
    monkeypatch.setattr(chosen, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert chosen.kv_writer(torch.device("cuda")) is chosen.write_with_torch
    assert "no Triton" in caplog.text
    monkeypatch.undo()
    assert chosen.kv_writer(torch.device("cuda")).__module__ == "kernels.triton_ops.index_ops"
