"""What a replay promises beside its result: hidden states as captured, and counts of what is real in this step."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from protos.wire.enums import GraphRefusal, HiddenMode
from tests.support.graph_bench import GraphBench, same
from tests.support.tiny_llama import tiny_folder
from worker_svc.batch.row_groups import HiddenCaptureGroup


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    torch.set_num_threads(1)
    bench = GraphBench(tiny_folder(tmp_path_factory.mktemp("tiny")))
    bench.capture()
    return bench


def rows_of(bench, lengths):
    rows = [bench.driver.row(list(range(7, 47 + length))) for length in lengths]
    bench.driver.step(rows, list(lengths))
    return rows


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_captured_at_last_no_states_and_last_states_replay_and_all_states_never_do(bench, monkeypatch, phase):
    rows = rows_of(bench, [5, 9])
    batch = bench.batch(rows, [1, 1] if phase == "decode" else [3, 4], bucket=2 if phase == "decode" else 16)
    runner = getattr(bench, phase)
    monkeypatch.setattr(runner, "shapes", replace(runner.shapes, hidden_mode=HiddenMode.LAST))

    def wanting(mode):
        group = HiddenCaptureGroup(modes=np.full(2, mode, np.uint8))
        return batch if mode is HiddenMode.NULL else replace(batch, hidden=group)

    expected = bench.eager(batch)
    for mode in (HiddenMode.NULL, HiddenMode.LAST):
        replayed = bench.replay(wanting(mode))
        assert replayed.hidden is None
        assert same(replayed, expected)
    assert runner.refusal(wanting(HiddenMode.FULL)) is GraphRefusal.HIDDEN_MODE
    whole = bench.eager(wanting(HiddenMode.FULL))
    assert whole.hidden.shape == (batch.num_tokens, whole.last_hidden.shape[1])
    assert same(whole, expected), "the mode changes no token"


def test_after_any_replay_the_device_count_of_real_tokens_equals_the_hosts(bench, monkeypatch):
    bound = []
    bind = bench.driver.context.bind

    def watching(batch):
        bound.append(batch)
        return bind(batch)

    monkeypatch.setattr(bench.driver.context, "bind", watching)
    rows = rows_of(bench, [3, 4, 5])
    steps = [([1, 1, 1], 4), ([4, 1, 6], 16), ([1], 1), ([2, 2], 32), ([1, 1], 4), ([9, 1, 1], 16)]
    for lens, bucket in steps:
        bench.replay(bench.batch(rows[: len(lens)], lens, bucket=bucket))
        padding = bound[-1].padding
        counts = (padding.global_tokens, padding.local_tokens)
        assert [count.host for count in counts] == [sum(lens)] * 2
        assert [count.device.tolist() for count in counts] == [[sum(lens)]] * 2
        assert bound[-1].num_tokens == bucket
