"""Attention inside a captured graph, as on a GPU: replays read its plan at the addresses of the capture, run no Python.

On a tape that captures marked calls operator by operator. flashinfer's calls bind to its signatures and are computed
from the buffers that its wrappers were made with.
"""

import random
from dataclasses import replace

import pytest
import torch

from protos.wire.enums import ForwardMode, GraphPhase
from protos.wire.plan import GraphChoice
from tests.support.fake_flashinfer import FAKE_FLASHINFER
from tests.support.graph_bench import GraphBench
from tests.support.inline_tape import InlineTapeDevice
from tests.support.tiny_llama import tiny_folder
from worker_svc.attention.flashinfer_backend import FlashInferAttention
from worker_svc.attention.flashinfer_wrappers import FlashInfer
from worker_svc.attention.native_backend import NativeAttention
from worker_svc.attention.phased_backend import PhasedAttention
from worker_svc.attention.registry import AttentionTools, attention_pair
from worker_svc.attention.tiled_backend import TiledAttention
from worker_svc.attention.torch_backend import TorchAttention
from worker_svc.device.device_graph import CaptureError
from worker_svc.forward_context import ForwardContext
from worker_svc.kv.kv_order import KVOrder

SETUPS = {
    "torch": {"attention": "torch"},
    "flashinfer": {"attention": "flashinfer", "order": KVOrder.NHD, "flashinfer": FAKE_FLASHINFER},
}
DECODE, PREFILL = (1, 2, 4, 8), (16, 32)


def made(folder, name, **changes):
    options = {"decode": DECODE, "prefill": PREFILL, "num_pages": 32} | changes
    return GraphBench(
        folder, backends=("full", "full"), numerics="fast", graphs=InlineTapeDevice(), **SETUPS[name], **options
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=SETUPS)
def bench(request, folder):
    bench = made(folder, request.param)
    for runner in (bench.prefill, bench.decode):
        if bench.driver.context.why_not_fixed(runner.shapes.mode, max_reqs=runner.shapes.max_reqs) is None:
            for size in reversed(runner.shapes.sizes):
                bench.capture_one(runner, size)
    return bench


def assert_same(found, known):
    for name in ("last_hidden", "logits", "finite"):
        torch.testing.assert_close(getattr(found, name), getattr(known, name), rtol=1e-3, atol=1e-4)


def test_decode_steps_of_any_size_and_order_equal_eager_ones(bench):
    bench.driver.release_all()
    draw = random.Random(2)
    rows = [bench.driver.row([draw.randrange(300) for _ in range(40)]) for _ in range(8)]
    bench.driver.step(rows, [draw.randrange(1, 6) for _ in rows])
    for count in (8, 1, 5, 2, 3, 4, 7, 1, 8, 6, 2):
        chosen = draw.sample(rows, count)
        batch = bench.batch(chosen, [1] * count, bucket=next(size for size in DECODE if size >= count))
        known = bench.eager(batch)
        bench.buffers.poison(draw.randrange(300))
        bench.device.arena.poison(0xFF)
        assert_same(bench.replay(batch), known)
        for row in chosen:
            row.kv_len += 1


def test_prefill_steps_of_any_rows_equal_eager_ones(bench):
    if bench.driver.context.why_not_fixed(ForwardMode.EXTEND, max_reqs=4) is not None:
        assert isinstance(bench.driver.context._attention[0], TorchAttention)
        return
    bench.driver.release_all()
    rows = [bench.driver.row([7 * row + place for place in range(60)]) for row in range(4)]
    for lens in ([9], [5, 1, 20, 3], [16], [1, 2], [4, 4, 4, 4], [13, 3], [2, 2, 1, 1]):
        chosen = rows[: len(lens)]
        batch = bench.batch(chosen, lens, bucket=16 if sum(lens) <= 16 else 32)
        known = bench.eager(batch)
        bench.device.arena.poison(0xFF)
        assert_same(bench.replay(batch), known)
        for row, length in zip(chosen, lens, strict=True):
            row.kv_len += length


def test_no_call_into_python_is_left_in_a_graph(bench):
    bench.driver.release_all()
    runs, run = [], bench.driver.context._attend
    bench.driver.context._attend = lambda *tensors, **options: runs.append(1) or run(*tensors, **options)
    row = bench.driver.row([1, 2, 3])
    bench.replay(bench.batch([row], [1], bucket=1))
    bench.driver.context._attend = run
    assert not runs


def test_a_replay_writes_real_slots_of_its_own_rows_only(bench):
    bench.driver.release_all()
    rows = [bench.driver.row(list(range(3, 40))) for _ in range(3)]
    bench.driver.step(rows, [5, 17, 2])
    pages = [bench.driver.pool.keys(layer) for layer in range(2)]
    before = [page.clone() for page in pages]
    bench.replay(bench.batch(rows, [1] * 3, bucket=8))
    for page, old in zip(pages, before, strict=True):
        changed = (page != old).any(-1).any(0).nonzero().tolist()
        own = {(row.pages[row.kv_len // 16], row.kv_len % 16) for row in rows}
        assert {(page, offset) for page, offset in changed if page} == own


def tensors_of(plan):
    """Everything that a replay reads of a plan at fixed addresses."""
    slots = plan.metadata.out_cache_loc
    if hasattr(plan.metadata, "wrapper"):
        return [slots, *plan.metadata.wrapper.buffers.values()]
    return [slots, plan._kv.pages, plan._kv.unused, plan._group.hidden]


def test_garbage_in_each_tensor_of_a_plan_changes_nothing(bench):
    bench.driver.release_all()
    rows = [bench.driver.row(list(range(5, 60))) for _ in range(3)]
    bench.driver.step(rows, [18, 4, 33])
    batch = bench.batch(rows, [1, 1, 1], bucket=4)
    known = bench.eager(batch)
    (plan,) = next(plans for key, plans in bench.decode._fixed.items() if key.bucket == 4)
    assert len(tensors_of(plan)) == 4
    for tensor in tensors_of(plan):
        with torch.inference_mode():
            tensor.fill_(1 if tensor.dtype is torch.bool else 7)
        assert_same(bench.replay(batch), known)


@pytest.mark.parametrize("name", SETUPS)
def test_verification_of_drafts_has_graphs_of_its_own_width(folder, name):
    """Three tokens a row: the width is part of the key, and steps of another width are refused."""
    inline = None if name == "torch" else InlineTapeDevice()
    bench = GraphBench(
        folder,
        backends=("full", "breakable"),
        numerics="fast",
        decode=(2, 4),
        num_pages=24,
        width=3,
        graphs=inline,
        **SETUPS[name],
    )
    for size in (4, 2):
        bench.capture_one(bench.decode, size)
    keys = {(key.bucket, key.width, key.num_tokens) for key in bench.decode._backend._captured}
    assert keys == {(4, 3, 12), (2, 3, 6)}
    rows = [bench.driver.row(list(range(9, 60))) for _ in range(3)]
    bench.driver.step(rows, [4, 9, 1])

    def verifying(chosen, lens, bucket):
        batch = bench.batch(chosen, lens, bucket=bucket)
        choice = GraphChoice(phase=GraphPhase.DECODE, bucket=bucket)
        mode = ForwardMode.TARGET_VERIFY
        return replace(batch, forward_mode=mode, logical_mode=mode, graph=choice)

    for chosen, bucket in ((rows, 4), (rows[:1], 2), (rows[1:], 2), (rows[:2], 4)):
        batch = verifying(chosen, [3] * len(chosen), bucket)
        known = bench.eager(batch)
        bench.buffers.poison(3)
        assert_same(bench.replay(batch), known)
        assert bench.decode.padded_tokens(batch) == 3 * (bucket - len(chosen))
    assert bench.decode.refusal(verifying(rows, [3, 2, 3], 4)).name == "MODE"
    assert bench.decode.refusal(bench.batch(rows, [1, 1, 1], bucket=4)).name == "MODE"


def test_a_shape_that_the_wrapper_refuses_is_not_captured(folder):
    class Full(FAKE_FLASHINFER.decode_wrapper):
        def plan(self, *arguments, **options):
            if self.buffers is not None:
                raise ValueError("no room")
            super().plan(*arguments, **options)

    library = FlashInfer(prefill_wrapper=FAKE_FLASHINFER.prefill_wrapper, decode_wrapper=Full)
    bench = GraphBench(
        folder,
        backends=("full", "full"),
        numerics="fast",
        num_pages=24,
        graphs=InlineTapeDevice(),
        **(SETUPS["flashinfer"] | {"flashinfer": library}),
    )
    with pytest.raises(CaptureError, match="no room"):
        bench.capture_one(bench.decode, 1)


def test_torch_attention_is_captured_only_as_far_as_a_gather_stays_small(folder):
    bench = made(folder, "torch")
    (attention,) = bench.driver.context._attention
    short = TorchAttention(attention.pool, context_tokens=64)
    assert short.why_not_fixed(ForwardMode.DECODE, max_reqs=512) is None
    assert "32832 slots for 513 rows" in short.why_not_fixed(ForwardMode.DECODE, max_reqs=513)
    assert "one by one" in short.why_not_fixed(ForwardMode.EXTEND, max_reqs=1)


def test_attention_without_fixed_addresses_says_so_and_a_pair_asks_the_side_of_the_step(folder):
    bench = made(folder, "flashinfer")
    (attention,) = bench.driver.context._attention
    assert isinstance(attention, FlashInferAttention)
    tiled = TiledAttention(attention.pool)
    pair = PhasedAttention(prefill=tiled, decode=attention)
    assert pair.why_not_fixed(ForwardMode.DECODE, max_reqs=4) is None
    for mode in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY):
        assert "TiledAttention" in pair.why_not_fixed(mode, max_reqs=4)
    assert ForwardContext(attention, tiled).why_not_fixed(ForwardMode.DECODE, max_reqs=1)
    assert "NativeAttention" in NativeAttention.why_not_fixed(
        NativeAttention.__new__(NativeAttention), ForwardMode.DECODE, max_reqs=1
    )
    tools = AttentionTools(num_q_heads=4, dtype=torch.float32, flashinfer=FAKE_FLASHINFER)
    mixed = attention_pair("torch", "flashinfer", attention.pool, tools)
    assert mixed.why_not_fixed(ForwardMode.DECODE, max_reqs=4) is None
