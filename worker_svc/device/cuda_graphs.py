"""Graphs of an NVIDIA GPU: `torch.cuda.CUDAGraph` behind the device graph protocol. One pool, one capture stream.

Guards: side streams that work forked are joined before a capture ends; every graph is kept alive with the pool.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from worker_svc.device.break_points import Marked, Result
from worker_svc.device.device_graph import CaptureError


class CudaGraph:
    """A `DeviceGraph`."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        """See `DeviceGraph.replay`. Ordered with the current stream."""
        self._graph.replay()


class CudaStreams:
    """The streams of a device's captures, made when they are first needed."""

    def __init__(self, device: torch.device) -> None:
        self.main = torch.cuda.Stream(device)
        self._device = device
        self._sides: list[torch.cuda.Stream] = []

    def side(self, index: int) -> torch.cuda.Stream:
        """For the work that is forked after `index` others."""
        while len(self._sides) <= index:
            self._sides.append(torch.cuda.Stream(self._device))
        return self._sides[index]


class CudaGraphDevice:
    """A `GraphDevice`. One thread at a time."""

    inlines_marked = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._streams = CudaStreams(device)
        self._num_bytes = 0

    @contextmanager
    def session(self) -> Iterator["CudaCaptureSession"]:
        """See `GraphDevice.session`."""
        before = torch.cuda.memory_reserved(self._device)
        self._streams.main.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._streams.main):
                yield CudaCaptureSession(self._pool, self._streams)
        finally:
            torch.cuda.current_stream(self._device).wait_stream(self._streams.main)
            self._num_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)

    def pool_bytes(self) -> int:
        """See `GraphDevice.pool_bytes`: how much more torch reserved during the captures."""
        return self._num_bytes

    def like(self, tensor: Tensor) -> Tensor:
        """See `GraphDevice.like`."""
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    def synchronise(self) -> None:
        """See `GraphDevice.synchronise`. A capture that begins while a warm-up still runs fails or records too much."""
        torch.cuda.synchronize(self._device)


class CudaCaptureSession:
    """A `CaptureSession` on the capture stream."""

    def __init__(self, pool: Any, streams: CudaStreams) -> None:
        self._pool = pool
        self._streams = streams

    def begin(self) -> "CudaCapture":
        """See `CaptureSession.begin`."""
        return CudaCapture(self._pool, self._streams)


class CudaCapture:
    """A `GraphCapture`, on from the start."""

    def __init__(self, pool: Any, streams: CudaStreams) -> None:
        self._streams = streams
        self._forked: list[torch.cuda.Stream] = []
        self._graph = torch.cuda.CUDAGraph()
        self._is_on = True
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")

    def marked(self, function: Marked, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> Result:
        """See `GraphCapture.marked`."""
        self.join()
        return function(*tensors, **options)

    def beside(self) -> AbstractContextManager[None]:
        """See `GraphCapture.beside`: on a stream of its own, which takes part from here on."""
        side = self._streams.side(len(self._forked))
        side.wait_stream(self._streams.main)
        self._forked.append(side)
        return torch.cuda.stream(side)

    def join(self) -> None:
        """See `GraphCapture.join`."""
        for side in self._forked:
            self._streams.main.wait_stream(side)
        self._forked.clear()

    def end(self) -> CudaGraph:
        """See `GraphCapture.end`."""
        try:
            self.join()
            self._is_on = False
            self._graph.capture_end()
        except RuntimeError as error:
            raise CaptureError(f"CUDA refused the capture: {error}") from error
        return CudaGraph(self._graph)

    def abandon(self) -> None:
        """See `GraphCapture.abandon`."""
        if not self._is_on:
            return
        self._is_on = False
        try:
            self.join()
            self._graph.capture_end()
        except RuntimeError as error:
            # The work that failed has already invalidated the capture; ending it says so once more.
            raise CaptureError(f"CUDA refused the capture: {error}") from error
