"""Replayed steps equal eager ones bit for bit, whatever stood in static buffers, padding and pages before."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from protos.wire.enums import GraphPhase, GraphRefusal, HiddenMode
from protos.wire.plan import GraphChoice
from tests.support.forwards import CPU, Row
from tests.support.graph_bench import GraphBench, same
from tests.support.tiny_llama import tiny_folder
from worker_svc.batch.row_groups import HiddenCaptureGroup
from worker_svc.batch.sink_batch import sink_batch
from worker_svc.runners.eligibility import GraphState

BACKENDS = (("full", "breakable"), ("breakable", "full"))


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda pair: "-".join(pair))
def captured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GraphBench:
    torch.set_num_threads(1)
    bench = GraphBench(tiny_folder(tmp_path_factory.mktemp("tiny")), backends=request.param, decode=(1, 2, 4, 8))
    bench.capture()
    return bench


@pytest.fixture
def bench(captured: GraphBench) -> GraphBench:
    """All pages free, all buckets live."""
    captured.driver.release_all()
    for runner in (captured.decode, captured.prefill):
        runner.shapes.states.update(dict.fromkeys(runner.shapes.sizes, GraphState.LIVE))
    return captured


def rows_of(bench: GraphBench, lengths: list[int], *, seed: int = 0) -> list[Row]:
    """Rows with `lengths[i]` tokens in the pool and room for more."""
    draw = random.Random(seed)
    rows = [bench.driver.row([draw.randrange(300) for _ in range(length + 40)]) for length in lengths]
    started = [row for row, length in zip(rows, lengths, strict=True) if length]
    if started:
        bench.driver.step(started, [length for length in lengths if length])
    return rows


def pages_of(bench: GraphBench) -> torch.Tensor:
    """Everything in the pool but the sink."""
    return torch.stack([bench.driver.pools[0].keys(layer)[:, 1:].clone() for layer in range(2)])


@pytest.mark.parametrize(("num_rows", "bucket"), [(1, 1), (1, 2), (2, 2), (3, 4), (4, 4), (5, 8), (7, 8), (8, 8)])
def test_a_decode_replay_equals_the_eager_step(bench: GraphBench, num_rows: int, bucket: int) -> None:
    rows = rows_of(bench, list(range(3, 3 + num_rows)))
    batch = bench.batch(rows, [1] * num_rows, bucket=bucket)
    expected = bench.eager(batch)
    for poison in (0, 299, 7):
        bench.buffers.poison(poison)
        assert same(bench.replay(batch), expected)


@pytest.mark.parametrize("lens", [[16], [9], [5, 4], [1, 7, 1, 6], [8, 8]])
def test_a_prefill_replay_equals_the_eager_step(bench: GraphBench, lens: list[int]) -> None:
    rows = rows_of(bench, [5 * index for index in range(len(lens))])
    for bucket in (16, 32):
        batch = bench.batch(rows, lens, bucket=bucket)
        bench.buffers.poison(255)
        assert same(bench.replay(batch), bench.eager(batch))


def test_garbage_in_each_buffer_that_graphs_share_changes_nothing(bench: GraphBench) -> None:
    """One at a time, so that none is saved by another: static inputs, kept tensors at borders, the graphs' pool."""
    rows = rows_of(bench, [4, 11, 23])
    kept = [tensor for tensors in bench.kept._kept.values() for tensor in tensors]
    garbage = [
        *(lambda buffer=buffer: buffer.tensor.fill_(77) for buffer in bench.buffers.buffers),
        *(lambda tensor=tensor: tensor.fill_(1 if tensor.dtype is torch.bool else 77) for tensor in kept),
        lambda: bench.device.arena.poison(0xFF),
    ]
    assert {buffer.field for buffer in bench.buffers.buffers} == {"input_ids", "positions"}
    assert len(kept) > 2
    batches = [bench.batch(rows, lens, bucket=bucket) for lens, bucket in (([1, 1, 1], 4), ([5, 2, 3], 16))]
    for batch, spoil in itertools.product(batches, garbage):
        expected = bench.eager(batch)
        with torch.inference_mode():
            spoil()
        assert same(bench.replay(batch), expected)


def test_padded_rows_change_no_real_slot_and_read_none(bench: GraphBench) -> None:
    rows = rows_of(bench, [20, 33, 7])
    batch = bench.batch(rows, [1] * 3, bucket=8)
    bench.eager(batch)
    before = pages_of(bench)
    expected = bench.replay(batch)
    assert torch.equal(pages_of(bench), before)
    for layer in range(2):
        bench.driver.pools[0].keys(layer)[:, 0].fill_(float("nan"))
        bench.driver.pools[0].values(layer)[:, 0].fill_(float("nan"))
    assert same(bench.replay(batch), expected)


def test_a_thousand_mixed_steps_in_any_order_equal_the_eager_ones(bench: GraphBench) -> None:
    draw = random.Random(5)
    rows = rows_of(bench, [0] * 4, seed=9)
    for step in range(1000):
        chosen = draw.sample(rows, draw.randint(1, 4))
        for row in chosen:
            row.kv_len = row.kv_len if row.left > 12 else 0
        if draw.random() < 0.5:
            lens, bucket = [1] * len(chosen), draw.choice([size for size in (1, 2, 4, 8) if size >= len(chosen)])
        else:
            lens = [draw.randint(1, 8) for _ in chosen]
            lens[0] = max(lens[0], 2)
            bucket = draw.choice([size for size in (16, 32) if size >= sum(lens)])
        batch = bench.batch(chosen, lens, bucket=bucket)
        bench.buffers.poison(step % 300)
        assert same(bench.replay(batch), bench.eager(batch))
        for row, length in zip(chosen, lens, strict=True):
            row.kv_len += length


def refusal(bench: GraphBench, lens: list[int], graph: GraphChoice | GraphRefusal) -> GraphRefusal | None:
    rows = rows_of(bench, [3] * len(lens))
    batch = replace(bench.batch(rows, lens, bucket=1), graph=graph)
    bench.driver.release(*rows)
    return (bench.decode if batch.extend is None else bench.prefill).refusal(batch)


def decode(bucket: int) -> GraphChoice:
    return GraphChoice(phase=GraphPhase.DECODE, bucket=bucket)


def prefill(bucket: int) -> GraphChoice:
    return GraphChoice(phase=GraphPhase.PREFILL, bucket=bucket)


def test_every_refusal_names_its_reason(bench: GraphBench) -> None:
    bench.decode.shapes.states[2] = GraphState.DEAD
    bench.prefill.shapes.states[32] = GraphState.PENDING
    assert refusal(bench, [1], decode(1)) is None
    assert refusal(bench, [2], prefill(16)) is None
    assert refusal(bench, [1], GraphRefusal.MASK) is GraphRefusal.MASK
    assert refusal(bench, [1], prefill(16)) is GraphRefusal.MODE
    assert refusal(bench, [1], decode(3)) is GraphRefusal.DISABLED
    assert refusal(bench, [1], decode(2)) is GraphRefusal.CAPTURE_FAILED
    assert refusal(bench, [9], prefill(32)) is GraphRefusal.NOT_CAPTURED_YET
    assert refusal(bench, [1] * 5, decode(4)) is GraphRefusal.OVER_MAX_ROWS
    assert refusal(bench, [9, 9], prefill(16)) is GraphRefusal.OVER_MAX_TOKENS
    assert refusal(bench, [2] * 5, prefill(16)) is GraphRefusal.TOO_MANY_SLOTS


def test_a_batch_that_wants_more_hidden_states_than_were_captured_is_refused(bench: GraphBench) -> None:
    (row,) = rows_of(bench, [3])
    batch = bench.batch([row], [1], bucket=1)
    wants = HiddenCaptureGroup(modes=np.array([HiddenMode.FULL], np.uint8))
    assert bench.decode.refusal(replace(batch, hidden=wants)) is GraphRefusal.HIDDEN_MODE


def test_padding_is_counted_against_the_bucket(bench: GraphBench) -> None:
    rows = rows_of(bench, [3, 3, 3])
    assert bench.decode.padded_tokens(bench.batch(rows, [1, 1, 1], bucket=8)) == 5
    assert bench.prefill.padded_tokens(bench.batch(rows, [4, 1, 6], bucket=16)) == 5


def test_other_steps_may_replay_while_a_bucket_is_captured(bench: GraphBench) -> None:
    rows = rows_of(bench, [4, 9])
    wide, narrow = bench.batch(rows, [1, 1], bucket=2), bench.batch(rows, [3, 2], bucket=16)
    expected = [bench.eager(batch) for batch in (wide, narrow)]
    seen = 0

    def serve() -> None:
        nonlocal seen
        seen += 1
        assert [same(bench.replay(batch), known) for batch, known in zip((wide, narrow), expected, strict=True)]

    for runner, size in ((bench.decode, 8), (bench.prefill, 32)):
        example = sink_batch(runner.shapes.mode, num_sub_pools=1, device=CPU)
        runner.capture(size, example=example, pause=serve)
    assert seen >= 2
    serve()
