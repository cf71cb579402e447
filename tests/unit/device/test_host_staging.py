"""Staging through page-locked slots, on copies that happen as late as they may; on a GPU, on its streams."""

import numpy as np
import pytest
import torch

from tests.support import plans
from tests.support.batch_content import content, storages
from tests.support.lazy_copies import LazyCopies
from tests.support.tiny_model import WIDTH, FlatTranslator, tiny_worker
from worker_svc.batch.builder import BatchBuilder
from worker_svc.device.cuda_copies import CudaCopies, transfers_of
from worker_svc.device.host_staging import PinnedStaging, direct_transfers, side_transfers

ARRAYS = (
    np.arange(7, dtype=np.int32),
    np.zeros((0,), np.int64),
    np.array([True, False, True]),
    np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4),
    np.arange(20, dtype=np.int64)[::2],
    np.frombuffer(np.arange(5, dtype="<i4").tobytes(), "<i4"),
    np.array(2**63 + 5, np.uint64),
)
INFO = plans.make_info(logits_width=WIDTH, limits=plans.make_limits(window=2))


def staged(staging, arrays):
    slot = staging.slot()
    tensors = [slot.put(array) for array in arrays]
    return tensors, slot.landing()


def assert_hold(tensors, arrays):
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.shape == array.shape
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)
        assert tensor.cpu().numpy().dtype == array.dtype


def test_arrays_of_every_kind_land_unchanged_and_on_borders_of_their_own():
    copies = LazyCopies()
    tensors, landing = staged(PinnedStaging(copies, num_slots=2), ARRAYS)
    landing()
    assert_hold(tensors, ARRAYS)
    assert {id(tensor) for tensor in copies.crossed} == {id(tensor) for tensor in tensors}, "the allocator is told"
    assert copies.host_waits == [], "the host waited for nothing"


def test_a_plan_that_lands_waits_for_its_own_copies_only():
    copies = LazyCopies()
    staging = PinnedStaging(copies, num_slots=2)
    first, land_first = staged(staging, [np.arange(4)])
    second, _ = staged(staging, [np.arange(4) + 10])
    land_first()
    assert_hold(first, [np.arange(4)])
    assert second[0].tolist() == [77] * 4, "not copied yet"


def test_each_plan_in_flight_has_a_slot_and_the_next_one_waits_for_the_oldest_copies():
    copies = LazyCopies()
    staging = PinnedStaging(copies, num_slots=2)
    first, _ = staged(staging, [np.full(3, 1)])
    second, land_second = staged(staging, [np.full(3, 2)])
    assert copies.host_waits == []
    assert len(copies.buffers) == 2
    third, land_third = staged(staging, [np.full(3, 3)])
    assert copies.host_waits == [1], "the first plan's copy, not the second's"
    land_second()
    land_third()
    assert_hold([*first, *second, *third], [np.full(3, 1), np.full(3, 2), np.full(3, 3)])


def test_a_slot_whose_copies_have_ended_is_taken_without_waiting():
    copies = LazyCopies()
    staging = PinnedStaging(copies, num_slots=2)
    for number in range(10):
        tensors, landing = staged(staging, [np.full(3, number)])
        landing()
        assert_hold(tensors, [np.full(3, number)])
    assert set(copies.host_waits) == {0}


def test_a_plan_refused_half_way_leaves_a_slot_that_waits_for_what_it_asked():
    copies = LazyCopies()
    staging = PinnedStaging(copies, num_slots=1)
    refused = staging.slot().put(np.arange(3))
    tensors, landing = staged(staging, [np.arange(3) + 5])
    landing()
    assert_hold([refused, *tensors], [np.arange(3), np.arange(3) + 5])


def test_a_plan_larger_than_its_slot_gets_a_larger_one_and_loses_nothing():
    copies = LazyCopies()
    staging = PinnedStaging(copies, num_slots=1)
    arrays = [np.arange(100_000) + number for number in range(4)]
    tensors, landing = staged(staging, arrays)
    for buffer in copies.buffers[:-1]:
        buffer.fill_(0)  # page-locked memory is handed to others the moment it is given back
    landing()
    assert_hold(tensors, arrays)
    num_buffers = len(copies.buffers)
    again, landing = staged(staging, arrays)
    landing()
    assert_hold(again, arrays)
    assert len(copies.buffers) <= num_buffers + 1
    staged(staging, arrays)
    assert len(copies.buffers) <= num_buffers + 1, "a slot that has grown stays so"


@pytest.mark.parametrize("make", [plans.make_mixed_plan, plans.make_rich_plan, lambda: plans.make_decode_plan(5)])
def test_batches_are_the_same_bits_as_without_staging_and_share_no_storage(make):
    plan = make()
    page_sizes = (16,) * len(plan.page_tables)
    builder = BatchBuilder(translator=FlatTranslator(16), page_sizes=page_sizes, device=torch.device("cpu"))
    copies = LazyCopies()
    slot = PinnedStaging(copies, num_slots=2).slot()
    batches = builder.build(plan, slot)
    slot.landing()()
    assert [content(batch) for batch in batches] == [content(batch) for batch in builder.build(plan)]
    begin = copies.buffers[0].data_ptr()
    assert not any(begin <= address < begin + len(copies.buffers[0]) for address in storages(batches))


def run_plans(transfers):
    """Three plans, the second and third staged before the first has run; the fourth is dropped."""
    worker = tiny_worker(INFO, transfers=transfers)
    prompts = ([1, 2, 3], [4, 5], [6, 7, 8, 9])
    made = [
        plans.make_plan(
            [plans.extend(0, len(ids), ids=ids, handle=9 + row, pages=[seq * 4 + row]) for row, ids in enumerate(each)],
            info=INFO,
            seq=seq,
        )
        for seq, each in enumerate([prompts, prompts[::-1], prompts[1:]], start=1)
    ]
    runs = [worker.stage(plan) for plan in made]
    worker.stage(made[0])
    return [run().rows.token_ids.tolist() for run in runs]


def test_plans_staged_ahead_give_the_same_tokens_through_slots():
    copies = LazyCopies()
    expected = run_plans(None)
    assert run_plans(side_transfers(copies, num_slots=2)) == expected
    assert any(copies.host_waits), "more plans were staged than there are slots"


def test_a_device_without_streams_copies_directly():
    transfers = transfers_of(torch.device("cpu"), num_slots=2)
    assert type(transfers) is type(direct_transfers(torch.device("cpu")))
    slot = transfers.staging.slot()
    source = np.arange(3)
    tensor = slot.put(source)
    slot.landing()()
    source[:] = 9
    assert tensor.tolist() == [0, 1, 2], "a copy of its own"


# --- on a GPU


def long_work(gpu):
    """Work of the computing stream that takes far longer than any copy here."""
    matrix = torch.randn(4096, 4096, device=gpu)
    for _ in range(60):
        matrix = matrix @ matrix
        matrix = matrix / matrix.abs().max()
    return matrix


@pytest.mark.gpu
def test_on_a_gpu_arrays_land_while_the_computing_stream_is_busy():
    gpu = torch.device("cuda", torch.cuda.current_device())
    staging = PinnedStaging(CudaCopies(gpu), num_slots=2)
    staged(staging, ARRAYS)
    busy = torch.cuda.Event()
    long_work(gpu)
    busy.record()
    rounds = [staged(staging, [np.full(1000, number), *ARRAYS]) for number in range(6)]
    assert not busy.query(), "slots were filled and filled again without waiting for the computing stream"
    for number, (tensors, landing) in enumerate(rounds):
        landing()
        assert_hold(tensors, [np.full(1000, number), *ARRAYS])


@pytest.mark.gpu
def test_on_a_gpu_results_come_without_waiting_for_work_behind_them():
    gpu = torch.device("cuda", torch.cuda.current_device())
    transfers = side_transfers(CudaCopies(gpu), num_slots=2)
    logits = torch.arange(12, device=gpu, dtype=torch.float32).reshape(3, 4)
    transfers.to_host(logits)
    values, ids = torch.max(logits * 2, dim=-1)
    torch.cuda.synchronize()
    sleeping = torch.cuda.Stream(gpu)
    with torch.cuda.stream(sleeping):
        long_work(gpu)
        end = torch.cuda.Event()
        end.record()
    host_ids, host_values = transfers.to_host(ids, values)
    assert not end.query(), "another stream's work is not waited for: no device-wide synchronisation"
    assert (host_ids.tolist(), host_values.tolist()) == ([3, 3, 3], [6.0, 14.0, 22.0])


@pytest.mark.gpu
def test_on_a_gpu_memory_of_a_dropped_plan_is_not_reused_under_its_readers():
    gpu = torch.device("cuda", torch.cuda.current_device())
    staging = PinnedStaging(CudaCopies(gpu), num_slots=2)
    for number in range(20):
        (tensor,), landing = staged(staging, [np.full(100_000, number)])
        landing()
        long = torch.empty(1 << 22, device=gpu).normal_()
        total = (long * 0).sum().long() + tensor.sum()
        del tensor, landing
        staged(staging, [np.full(100_000, 10**6)])
        assert int(total) == number * 100_000
