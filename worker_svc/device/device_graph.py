"""What a device must offer so that work can be captured once and replayed: the contract of CUDA graphs, as a protocol.

Two implementations: `tape.py` (CPU) and `cuda_graphs.py`. Guards, for both: a replay runs no Python of the model, uses
the addresses of the capture, makes no storage but the scratch that is declared, and overwrites the outputs of the last
replay. What cannot be replayed makes the capture fail, with the operator's name.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from worker_svc.device.break_points import Marked, Result


class CaptureError(Exception):
    """This stretch of work cannot be captured. The device, and everything captured before, is as it was."""


class DeviceGraph(Protocol):
    """Captured work. Lives as long as its owner wants to replay it."""

    def replay(self) -> None:
        """Run it again on whatever its inputs hold now, in order with the device's other work."""
        ...


class GraphCapture(Protocol):
    """A capture that is on: what runs on this thread is recorded. A `BreakPolicy` for marked calls inside the graph."""

    def marked(self, function: Marked, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> Result:
        """Make a marked call part of the graph: each replay runs it on the captured addresses.

        On a GPU its operators are captured. On the CPU it is one call of the tape, free to look at values.
        """
        ...

    def beside(self) -> AbstractContextManager[None]:
        """See `BreakPoints.beside`."""
        ...

    def join(self) -> None:
        """See `BreakPoints.join`. `end` joins too."""
        ...

    def end(self) -> DeviceGraph:
        """Stop recording.

        Raises:
            CaptureError: something that ran cannot be replayed.
        """
        ...

    def abandon(self) -> None:
        """Stop recording and forget. Safe after `end`, and after a failure."""
        ...


class CaptureSession(Protocol):
    """One shape's captures, in the order in which they replay. Memory that one of them frees serves the next."""

    def begin(self) -> GraphCapture:
        """Start recording. One capture at a time."""
        ...


class GraphDevice(Protocol):
    """Makes graphs. All graphs of one share one pool of memory, so no two of them may replay at once."""

    @property
    def inlines_marked(self) -> bool:
        """Whether marked calls inside a graph are captured operator by operator: what they read keeps its address."""
        ...

    def session(self) -> AbstractContextManager[CaptureSession]:
        """The captures of one shape."""
        ...

    def pool_bytes(self) -> int:
        """What the pool holds, all captures together."""
        ...

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape and dtype outside the pool, at an address that nothing else gets."""
        ...

    def synchronise(self) -> None:
        """Wait until everything that was started is done."""
        ...
