"""What every graph back-end offers to the runners.

A back-end captures work under a key and replays it. It knows nothing of phases, buckets, padding or batches: a new one
needs no change in a runner. Guards: after a failed capture everything captured before replays as it did.
"""

from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from worker_svc.device.break_points import BreakPoints

Outputs = tuple[Tensor, ...]
Work = Callable[[], Outputs]
"""Reads and writes fixed addresses only, and does the same operators each time."""
Pause = Callable[[], None]
"""Called between two indivisible pieces of a capture: other work of the device may run now, replays included."""
Preparation = Callable[[], None]
"""Host work that may take minutes. Beside the device's thread, once."""
CapturedT = TypeVar("CapturedT")


def no_pause() -> None:
    """Go on at once."""


class GraphBackend(Protocol):
    """Made once at start. One thread."""

    @property
    def name(self) -> str:
        """For settings, logs and metrics."""
        ...

    @property
    def holds_marked(self) -> bool:
        """Whether a graph holds the operators of marked calls, so that what these read must keep its address."""
        ...

    def preparation(self, work: Work, *, breaks: BreakPoints) -> Preparation | None:
        """What has to be done before work like `work` can be captured without holding up the device; None: nothing.

        `work` marks its calls at `breaks`. It runs beside other forwards: what it reads may change under it, what it
        gives is dropped, and it writes the sink only.
        """
        ...

    def capture(self, key: Hashable, work: Work, *, pause: Pause = no_pause) -> Outputs:
        """Warm up, run `work` once more and keep how to replay it. Capture the largest shape first.

        Returns:
            Its outputs. Each replay overwrites them; so does a replay of any other key.

        Raises:
            CaptureError: it cannot be captured; the key stays unknown.
        """
        ...

    def has(self, key: Hashable) -> bool:
        """Whether `key` can be replayed."""
        ...

    def replay(self, key: Hashable) -> Outputs:
        """Run the captured work again.

        Raises:
            KeyError: nothing was captured under `key`.
        """
        ...

    def close(self) -> None:
        """Forget everything."""
        ...


class KeyedBackend(Generic[CapturedT]):
    """What all back-ends have in common: captures by key, and nothing to prepare."""

    holds_marked = False

    def __init__(self) -> None:
        self._captured: dict[Hashable, CapturedT] = {}

    def preparation(self, work: Work, *, breaks: BreakPoints) -> Preparation | None:  # noqa: ARG002 - the protocol's
        """See `GraphBackend.preparation`."""
        return None

    def has(self, key: Hashable) -> bool:
        """See `GraphBackend.has`."""
        return key in self._captured

    def close(self) -> None:
        """See `GraphBackend.close`."""
        self._captured.clear()
