"""Triton's index work and KV writes against plain torch: compiled where there is a GPU, interpreted elsewhere."""

import importlib

import pytest
import torch

from kernels.reference import index_ops as reference
from tests.support.attention_cases import Heads, make_pool
from worker_svc.kv.kv_order import KVOrder

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture(scope="module")
def ops():
    """The kernels read the environment when they are defined."""
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            patch.setenv("TRITON_INTERPRET", "1")
        yield importlib.reload(importlib.import_module("kernels.triton_ops.index_ops"))


def put(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("prefixes", "lens"), [((0,), (1,)), ((0, 5, 100), (3, 0, 300)), ((7, 2**30), (600, 1)), ((3, 4), (0, 0))]
)
def test_positions_go_on_from_each_rows_prefix(ops, prefixes, lens):
    found = ops.extend_positions(put(*prefixes), put(*lens), num_tokens=sum(lens), longest=max(lens))
    assert torch.equal(found.cpu(), reference.extend_positions(put(*prefixes), put(*lens)))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_slots_follow_the_page_table(ops, page_size):
    rng = torch.Generator().manual_seed(0)
    lens, firsts = (300, 1, 70), (0, 0, page_size)
    rows = torch.repeat_interleave(torch.arange(3), torch.tensor(lens))
    positions = torch.cat([first + torch.arange(count) for first, count in zip(firsts, lens, strict=True)])
    counts = [-(-count // page_size) for count in lens]
    indices = (torch.randperm(sum(counts), generator=rng) + 1).int()
    table = (torch.tensor([0, *counts]).cumsum(0).int(), indices, torch.tensor(firsts, dtype=torch.int32))
    moved = tuple(part.to(DEVICE) for part in table)
    found = ops.page_slots(positions.to(DEVICE), rows.to(DEVICE), table=moved, page_size=page_size)
    assert torch.equal(found.cpu(), reference.page_slots(positions, rows, table=table, page_size=page_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [Heads(keys=1, dim=64), Heads(keys=3, dim=80)])
@pytest.mark.parametrize("order", KVOrder)
def test_keys_reach_their_slots_in_any_order_and_the_sink_is_left_alone(ops, order, heads, dtype):
    known, found = (make_pool(7.0, heads=heads, order=order, dtype=dtype) for _ in range(2))
    source = torch.randn(4, 2 * heads.keys, heads.dim, generator=torch.Generator().manual_seed(0))[:, heads.keys :]
    slots = torch.tensor([3, 16, 1279, 500])
    reference.write_kv(source, slots, known.keys(1))
    on_device = found.keys(1).to(DEVICE)
    ops.write_kv(source.to(DEVICE), slots.to(DEVICE), on_device)
    assert torch.equal(on_device.cpu(), known.keys(1))
    assert (on_device[:, 0] == 7.0).all()
    assert (on_device[:, 1, 0] != 7.0).all()


def test_a_reference_is_looked_up_and_a_literal_stays(ops):
    literals, references, sampled = put(5, 0, 0, 9), put(-1, 2, 0, -1), put(70, 80, 90)
    found = ops.resolved_tokens(literals, references, sampled)
    assert found.tolist() == [5, 90, 70, 9]
    assert torch.equal(found.cpu(), reference.resolved_tokens(literals, references, sampled))


def test_nothing_to_do_is_done(ops):
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert len(ops.page_slots(nothing, nothing, table=(put(0), put(), put()), page_size=16)) == 0
    assert len(ops.resolved_tokens(nothing.int(), nothing.int(), put(1))) == 0
    ops.write_kv(torch.empty(0, 2, 64, device=DEVICE), nothing, make_pool(0.0).keys(1))
