"""Graphs of an NVIDIA GPU: `torch.cuda.CUDAGraph` behind the device graph protocol. One pool, one capture stream.

Guards: side streams that work forked are joined before a capture ends; every graph is kept alive with the pool.
"""

from collections.abc import Iterator
from contextlib import contextmanager
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


class CudaGraphDevice:
    """A `GraphDevice`. One thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._num_bytes = 0

    @contextmanager
    def session(self) -> Iterator["CudaCaptureSession"]:
        """See `GraphDevice.session`."""
        before = torch.cuda.memory_reserved(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                yield CudaCaptureSession(self._pool, self._stream)
        finally:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
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

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._pool = pool
        self._stream = stream

    def begin(self) -> "CudaCapture":
        """See `CaptureSession.begin`."""
        return CudaCapture(self._pool, self._stream)


class CudaCapture:
    """A `GraphCapture`, on from the start."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._forked: list[torch.cuda.Stream] = []
        self._graph = torch.cuda.CUDAGraph()
        self._is_on = True
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")

    def fork(self, side: torch.cuda.Stream) -> None:
        """Let `side` take part from here on. `end` joins it."""
        side.wait_stream(self._stream)
        self._forked.append(side)

    def marked(self, function: Marked, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> Result:
        """See `GraphCapture.marked`."""
        return function(*tensors, **options)

    def end(self) -> CudaGraph:
        """See `GraphCapture.end`."""
        try:
            for side in self._forked:
                self._stream.wait_stream(side)
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
            self._graph.capture_end()
        except RuntimeError as error:
            # The work that failed has already invalidated the capture; ending it says so once more.
            raise CaptureError(f"CUDA refused the capture: {error}") from error
