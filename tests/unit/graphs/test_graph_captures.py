"""Captures: the largest first, the most missed under load, and a failure kills one bucket only."""

import itertools
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from protos.wire.enums import GraphPhase, GraphRefusal
from tests.support.graph_bench import GraphBench, same
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


def test_a_short_piece_behind_a_long_warm_up_is_expected_to_be_short(
    captures: GraphCaptures, bench: GraphBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken to be as long as the warm-up, each of dozens would wait for an idle device."""

    def work(ticks: int) -> None:
        for _ in range(ticks):
            captures._clock_ns()

    def capture(bucket: int, *, example: object, pause: Callable[[], None]) -> None:
        work(10_000)
        for ticks in (5000, 10, 10, 10, 10):  # the first takes memory
            pause()
            work(ticks)

    monkeypatch.setattr(bench.prefill, "capture", capture)
    expected_ms: list[float] = []
    assert captures.capture(PREFILL, 32, give_way=expected_ms.append)
    assert len(expected_ms) == 5
    assert max(expected_ms[2:]) < expected_ms[0] / 100


def test_time_that_other_work_takes_at_a_pause_is_not_counted(captures: GraphCaptures) -> None:
    captures.capture(DECODE, 4)
    quick = captures.progress.totals[DECODE].seconds
    captures.capture(DECODE, 2, give_way=lambda _: [captures._clock_ns() for _ in range(1000)] and None)
    assert captures.progress.totals[DECODE].seconds < 4 * quick


class Preparing:
    """A back-end whose captures need a preparation, which ends when it is let go; `fails` says how."""

    def __init__(self, backend, *, fails=None):
        self.go = threading.Event()
        self.prepared_on = []
        self._backend, self._fails = backend, fails

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def preparation(self, work, *, breaks):
        def prepare():
            assert self.go.wait(30)
            if self._fails is not None:
                raise self._fails
            with breaks.straight():
                work()
            self.prepared_on.append(threading.current_thread().name)

        return prepare


def prepared_captures(bench: GraphBench, monkeypatch: pytest.MonkeyPatch, **options):
    backend = Preparing(bench.decode._backend, **options)
    monkeypatch.setattr(bench.decode, "_backend", backend)
    parts = CaptureParts(device=bench.device, kept=bench.kept, num_sub_pools=1, torch_device=torch.device("cpu"))
    ticks = itertools.count(step=1_000_000)
    return backend, GraphCaptures((bench.decode, bench.prefill), parts=parts, clock_ns=lambda: next(ticks))


def capture_what_is_ready(captures: GraphCaptures) -> None:
    while captures.next_ms(is_idle=True) is not None:
        captures.capture_next(is_idle=True)


def until_done(captures: GraphCaptures) -> None:
    end = time.monotonic() + 10
    while not captures.progress.is_done:
        assert time.monotonic() < end
        capture_what_is_ready(captures)
        time.sleep(0.001)


def test_what_needs_a_preparation_is_captured_after_it_and_steps_run_meanwhile(
    bench: GraphBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, captures = prepared_captures(bench, monkeypatch)
    capture_what_is_ready(captures)
    assert {entry.phase: entry.live for entry in captures.progress.buckets} == {DECODE: (), PREFILL: (16, 32)}
    assert not captures.progress.is_done
    row = bench.driver.row(list(range(40)))
    batch = bench.batch([row], [9], bucket=16)
    assert same(bench.replay(batch), bench.eager(batch))
    refused = bench.batch([row], [1], bucket=4)
    assert bench.decode.refusal(refused) is GraphRefusal.NOT_CAPTURED_YET
    before = captures.progress.totals[DECODE].seconds
    backend.go.set()
    until_done(captures)
    assert {entry.phase: entry.live for entry in captures.progress.buckets}[DECODE] == (1, 2, 4)
    assert backend.prepared_on == ["graph preparation"] * 3
    assert captures.progress.totals[DECODE].seconds > before


def test_a_preparation_that_fails_kills_its_bucket(
    bench: GraphBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend, captures = prepared_captures(bench, monkeypatch, fails=CaptureError("no compiler"))
    backend.go.set()
    until_done(captures)
    decode, prefill = captures.progress.buckets
    assert (decode.dead, prefill.live) == ((1, 2, 4), (16, 32))
    assert captures.progress.totals[DECODE].failed == 3
    assert {record.why for record in caplog.records if hasattr(record, "why")} == {"no compiler"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_a_preparation_kills_its_bucket_too(bench: GraphBench, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, captures = prepared_captures(bench, monkeypatch, fails=KeyError("bug"))
    backend.go.set()
    until_done(captures)
    assert captures.progress.buckets[0].dead == (1, 2, 4)
