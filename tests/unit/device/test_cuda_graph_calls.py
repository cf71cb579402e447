"""What is called of torch's CUDA graphs, checked without a GPU: each call binds to torch's signature, in order."""

import inspect
from contextlib import contextmanager

import pytest
import torch

from worker_svc.device.cuda_graphs import CudaGraphDevice
from worker_svc.device.device_graph import CaptureError

DEVICE = torch.device("cuda")
REAL = {name: getattr(torch.cuda.CUDAGraph, name) for name in ("capture_begin", "capture_end", "replay")}
REAL |= {"wait_stream": torch.cuda.Stream.wait_stream}


class Recorded:
    """A stand-in of one of torch's classes: its methods bind to the real signatures and are written down."""

    def __init__(self, events, name, fails=()):
        self.events, self.name, self.fails = events, name, fails

    def __getattr__(self, method):
        signature = inspect.signature(REAL[method])

        def call(*arguments, **options):
            given = dict(signature.bind(self, *arguments, **options).arguments)
            given.pop("self")
            self.events.append((self.name, method, *given.values()))
            if method in self.fails:
                raise RuntimeError("operation failed due to a previous error during capture")

        return call

    def __repr__(self):
        return self.name


class CudaCalls:
    """Takes the place of the functions of `torch.cuda` that are used."""

    def __init__(self, patch):
        self.events, self.fails = [], set()
        self.reserved = iter((100, 300, 300, 250))
        self.main, self.capture, self.side = (Recorded(self.events, name) for name in ("main", "capture", "side"))
        self.streams = iter((self.capture, self.side))
        functions = {
            "graph_pool_handle": lambda: "pool",
            "Stream": lambda device: next(self.streams),
            "CUDAGraph": lambda: Recorded(self.events, "graph", self.fails),
            "current_stream": lambda device: self.main,
            "memory_reserved": lambda device: next(self.reserved),
            "stream": self.on_stream,
            "synchronize": lambda device: self.events.append(("device", "synchronize")),
        }
        for name, function in functions.items():
            real = inspect.signature(getattr(torch.cuda, name))
            patch.setattr(torch.cuda, name, bound(real, function))

    @contextmanager
    def on_stream(self, stream):
        if stream is self.side:
            self.events.append(("side", "works"))
        yield


def bound(signature, function):
    def call(*arguments, **options):
        signature.bind(*arguments, **options)
        return function(*arguments, **options)

    return call


@pytest.fixture
def calls(monkeypatch):
    return CudaCalls(monkeypatch)


FORK = [("side", "wait_stream", "capture"), ("side", "works")]
JOIN = ("capture", "wait_stream", "side")


def named(events):
    return [tuple(part.name if isinstance(part, Recorded) else part for part in event) for event in events]


@pytest.mark.parametrize("joins", [lambda capture: capture.join(), lambda capture: capture.marked(len, ([],), {})])
def test_work_beside_is_joined_when_it_is_asked_for_and_before_a_marked_call(calls, joins):
    with CudaGraphDevice(DEVICE).session() as session:
        capture = session.begin()
        for _ in range(2):
            with capture.beside():
                pass
            joins(capture)
        capture.end()
    begin, *forks, end = named(calls.events)[1:-1]
    assert (begin[1], end) == ("capture_begin", ("graph", "capture_end"))
    assert forks == [*FORK, JOIN, *FORK, JOIN]


def test_work_beside_a_capture_that_is_abandoned_is_joined_first(calls):
    with CudaGraphDevice(DEVICE).session() as session:
        capture = session.begin()
        with capture.beside():
            pass
        capture.abandon()
    assert named(calls.events)[-4:-1] == [FORK[1], JOIN, ("graph", "capture_end")]


def test_a_capture_runs_on_its_own_stream_joins_what_was_forked_and_shares_the_pool(calls):
    device = CudaGraphDevice(DEVICE)
    device.synchronise()
    with device.session() as session:
        for _ in range(2):
            capture = session.begin()
            assert capture.marked(lambda value, *, plus: value + plus, (torch.ones(1),), {"plus": 2}).item() == 3
            with capture.beside():
                pass
            graph = capture.end()
            capture.abandon()
    graph.replay()
    one_capture = [
        ("graph", "capture_begin", "pool", "thread_local"),
        *FORK,
        JOIN,
        ("graph", "capture_end"),
    ]
    assert named(calls.events) == [
        ("device", "synchronize"),
        ("capture", "wait_stream", "main"),
        *one_capture,
        *one_capture,
        ("main", "wait_stream", "capture"),
        ("graph", "replay"),
    ]
    assert device.pool_bytes() == 200


def begin_and(finish):
    def run(device):
        with device.session() as session:
            finish(session.begin())

    return run


@pytest.mark.parametrize("finish", [lambda capture: capture.end(), lambda capture: capture.abandon()])
def test_a_capture_that_cuda_refuses_fails_as_such_and_the_streams_are_in_order_again(calls, finish):
    calls.fails.add("capture_end")
    device = CudaGraphDevice(DEVICE)
    with pytest.raises(CaptureError, match=r"CUDA refused.*previous error"):
        begin_and(finish)(device)
    assert calls.events[-1] == ("main", "wait_stream", calls.capture)


def test_memory_that_torch_gives_back_during_a_capture_counts_as_none(calls):
    device = CudaGraphDevice(DEVICE)
    for expected in (200, 200):
        begin_and(lambda capture: capture.end())(device)
        assert device.pool_bytes() == expected
