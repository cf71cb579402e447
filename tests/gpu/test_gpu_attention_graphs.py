"""Whole graphs with attention inside, on a GPU: replays equal eager steps. The same rounds run on the CPU's tape."""

import random

import pytest
import torch

from protos.wire.enums import GraphPhase
from tests.support.fake_flashinfer import FAKE_FLASHINFER
from tests.support.forwards import moved
from tests.support.graph_bench import GraphBench
from tests.support.inline_tape import InlineTapeDevice
from tests.support.model import model_folder
from tests.support.tiny_llama import tiny_folder
from worker_svc.attention.machine import attention_machine
from worker_svc.device.cuda_graphs import CudaGraphDevice
from worker_svc.kv.kv_order import KVOrder
from worker_svc.runners.shape_key import ShapeKey

DECODE, PREFILL, SLOTS = (1, 2, 4, 8), (16, 64), 4
TOLERANCES = {"torch": 0.02, "flashinfer": 0.75}
"""Of logits; float32, and bfloat16 with another split of the work."""


def whole_graphs(folder, *, attention, flashinfer, **options):
    """Captured, the largest first; prefill only where attention can lie inside."""
    order = KVOrder.HEADS if attention == "torch" else KVOrder.NHD
    bench = GraphBench(
        folder,
        backends=("full", "full"),
        decode=DECODE,
        prefill=PREFILL,
        slots=SLOTS,
        numerics="fast",
        num_pages=41,
        attention=attention,
        order=order,
        flashinfer=flashinfer,
        **options,
    )
    for runner in (bench.prefill, bench.decode):
        shapes = runner.shapes
        if bench.driver.context.why_not_fixed(shapes.mode, max_reqs=shapes.max_reqs) is None:
            for size in reversed(shapes.sizes):
                bench.capture_one(runner, size)
    return bench


def assert_equal_steps(bench, tolerance):
    """Decode in buckets of every order, then prompts in chunks where they were captured; how many steps replayed."""
    draw = random.Random(4)
    rows = [bench.driver.row([draw.randrange(250) for _ in range(70)]) for _ in range(8)]
    bench.driver.step(rows, [draw.randrange(1, 20) for _ in rows])
    steps = [[1] * count for count in (8, 1, 5, 2, 3, 4, 7, 1, 8)]
    if bench.prefill.shapes.states:
        steps += [[9], [5, 1, 20, 3], [16], [1, 2], [13, 3], [2, 2, 1, 1]]
    for lens in steps:
        chosen = draw.sample(rows, len(lens))
        is_decode = set(lens) == {1}
        sizes, real = (DECODE, len(lens)) if is_decode else (PREFILL, sum(lens))
        batch = bench.batch(chosen, lens, bucket=next(size for size in sizes if size >= real))
        known = moved(bench.eager(batch).logits, torch.device("cpu"))
        bench.buffers.poison(draw.randrange(250))
        found = bench.replay(batch)
        assert bool(found.finite.all())
        torch.testing.assert_close(found.logits.cpu(), known, rtol=0, atol=tolerance)
        for row, length in zip(chosen, lens, strict=True):
            row.kv_len += length
    return len(steps)


@pytest.mark.parametrize(("attention", "steps"), [("torch", 9), ("flashinfer", 15)])
def test_the_rounds_run_on_any_device(tmp_path, attention, steps):
    torch.set_num_threads(1)
    folder = tiny_folder(tmp_path)
    bench = whole_graphs(folder, attention=attention, flashinfer=FAKE_FLASHINFER, graphs=InlineTapeDevice())
    assert assert_equal_steps(bench, 1e-3) == steps


def real_bench(attention):
    library = None
    if attention == "flashinfer":
        machine = attention_machine({"flashinfer"})
        library = machine.flashinfer
        if library is None:
            pytest.skip(machine.absent["flashinfer"])
    device = torch.device("cuda")
    return whole_graphs(
        model_folder(),
        attention=attention,
        flashinfer=library,
        dtype="float32" if attention == "torch" else "bfloat16",
        device=device,
        graphs=CudaGraphDevice(device),
    )


@pytest.mark.gpu
@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("attention", TOLERANCES)
def test_whole_graphs_with_attention_inside_equal_eager_steps(attention):
    bench = real_bench(attention)
    assert bench.decode.backend_name == "full"
    with torch.inference_mode():
        assert_equal_steps(bench, TOLERANCES[attention])


@pytest.mark.gpu
@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("attention", TOLERANCES)
def test_a_replay_with_attention_inside_allocates_nothing(attention):
    bench = real_bench(attention)
    row = bench.driver.row(list(range(7, 40)))
    bench.driver.step([row], [20])
    bench.replay(bench.batch([row], [1], bucket=1))
    key = ShapeKey(phase=GraphPhase.DECODE, bucket=1)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(5):
        bench.decode._backend.replay(key)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
