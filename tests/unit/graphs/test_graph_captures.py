"""Captures: the largest first, the most missed under load, and a failure kills one bucket only."""

import itertools
import math
from pathlib import Path

import pytest
import torch

from protos.wire.enums import GraphPhase
from tests.support.graph_bench import GraphBench
from tests.support.tiny_llama import tiny_folder
from worker_svc.device.device_graph import CaptureError
from worker_svc.runners.graph_captures import CaptureParts, GraphCaptures

DECODE, PREFILL = GraphPhase.DECODE, GraphPhase.PREFILL


@pytest.fixture
def bench(tmp_path: Path) -> GraphBench:
    torch.set_num_threads(1)
    return GraphBench(tiny_folder(tmp_path))


@pytest.fixture
def captures(bench: GraphBench) -> GraphCaptures:
    ticks = itertools.count(step=1_000_000)
    parts = CaptureParts(device=bench.device, kept=bench.kept, num_sub_pools=1, torch_device=torch.device("cpu"))
    return GraphCaptures((bench.decode, bench.prefill), parts=parts, clock_ns=lambda: next(ticks))


def test_while_idle_the_largest_bucket_comes_first(captures: GraphCaptures) -> None:
    order = []
    while (chosen := captures.next_bucket(is_idle=True)) is not None:
        order.append(chosen)
        assert captures.capture(*chosen)
    assert order == [(PREFILL, 32), (PREFILL, 16), (DECODE, 4), (DECODE, 2), (DECODE, 1)]
    assert [entry.live for entry in captures.progress.buckets] == [(1, 2, 4), (16, 32)]
    assert captures.progress.totals[DECODE].captured == 3


def test_under_load_the_most_missed_bucket_follows_the_largest(captures: GraphCaptures) -> None:
    captures.note_miss(DECODE, 2)
    for _ in range(3):
        captures.note_miss(DECODE, 3)
    captures.note_miss(DECODE, 99)
    assert captures.next_bucket(is_idle=False) == (PREFILL, 32)
    captures.capture(PREFILL, 32)
    assert captures.next_bucket(is_idle=False) == (DECODE, 4)
    captures.capture(DECODE, 4)
    assert captures.next_bucket(is_idle=False) == (DECODE, 2)
    captures.capture(DECODE, 2)
    assert captures.next_bucket(is_idle=False) == (PREFILL, 16)


def test_a_capture_that_fails_kills_its_bucket_and_nothing_else(
    captures: GraphCaptures, bench: GraphBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captures.capture(DECODE, 4)

    def fails(*_: object, **__: object) -> None:
        raise CaptureError("no memory for this one")

    with monkeypatch.context() as patch:
        patch.setattr(bench.decode, "capture", fails)
        assert not captures.capture(DECODE, 2)
    assert captures.progress.totals[DECODE].failed == 1
    assert captures.next_bucket(is_idle=True) == (PREFILL, 32)
    assert captures.capture(DECODE, 1)
    assert captures.progress.buckets[0].live == (1, 4)
    assert "could not be captured" in caplog.text


def test_smaller_buckets_take_no_more_memory_and_time_is_predicted(captures: GraphCaptures) -> None:
    assert captures.next_ms(is_idle=True) == math.inf
    captures.capture(PREFILL, 32)
    alone = captures.progress.totals[PREFILL].graph_bytes
    assert 0 < captures.next_ms(is_idle=True) < math.inf
    captures.capture(PREFILL, 16)
    assert alone > 0
    assert captures.progress.totals[PREFILL].graph_bytes < 1.3 * alone


def test_time_that_other_work_takes_at_a_pause_is_not_counted(captures: GraphCaptures) -> None:
    captures.capture(DECODE, 4)
    quick = captures.progress.totals[DECODE].seconds
    captures.capture(DECODE, 2, give_way=lambda _: [captures._clock_ns() for _ in range(1000)] and None)
    assert captures.progress.totals[DECODE].seconds < 4 * quick
