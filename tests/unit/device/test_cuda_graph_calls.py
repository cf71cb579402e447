"""What is called of torch's CUDA graphs, checked without a GPU: each call binds to torch's signature, in order."""

import inspect

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
        self.main, self.capture = (Recorded(self.events, name) for name in ("main", "capture"))
        functions = {
            "graph_pool_handle": lambda: "pool",
            "Stream": lambda device: self.capture,
            "CUDAGraph": lambda: Recorded(self.events, "graph", self.fails),
            "current_stream": lambda device: self.main,
            "memory_reserved": lambda device: next(self.reserved),
            "stream": lambda stream: torch.autograd.profiler.record_function(f"on {stream}"),
            "synchronize": lambda device: self.events.append(("device", "synchronize")),
        }
        for name, function in functions.items():
            real = inspect.signature(getattr(torch.cuda, name))
            patch.setattr(torch.cuda, name, bound(real, function))


def bound(signature, function):
    def call(*arguments, **options):
        signature.bind(*arguments, **options)
        return function(*arguments, **options)

    return call


@pytest.fixture
def calls(monkeypatch):
    return CudaCalls(monkeypatch)


def test_a_capture_runs_on_its_own_stream_joins_what_was_forked_and_shares_the_pool(calls):
    device, side = CudaGraphDevice(DEVICE), Recorded(calls.events, "side")
    device.synchronise()
    with device.session() as session:
        for _ in range(2):
            capture = session.begin()
            capture.fork(side)
            assert capture.marked(lambda value, *, plus: value + plus, (torch.ones(1),), {"plus": 2}).item() == 3
            graph = capture.end()
            capture.abandon()
    graph.replay()
    one_capture = [
        ("graph", "capture_begin", "pool", "thread_local"),
        ("side", "wait_stream", calls.capture),
        ("capture", "wait_stream", side),
        ("graph", "capture_end"),
    ]
    assert calls.events == [
        ("device", "synchronize"),
        ("capture", "wait_stream", calls.main),
        *one_capture,
        *one_capture,
        ("main", "wait_stream", calls.capture),
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
