"""A tape that captures marked calls operator by operator, as a GPU's graph does: what they read keeps its address."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from worker_svc.device.break_points import Marked, Result
from worker_svc.device.tape import TapeCapture, TapeDevice, TapeSession


class InlineTapeDevice(TapeDevice):
    """A `GraphDevice` of the CPU in the place of a GPU."""

    inlines_marked = True

    @contextmanager
    def session(self) -> Iterator["InlineTapeSession"]:
        self.arena.start_session()
        yield InlineTapeSession(self.arena)


class InlineTapeSession(TapeSession):
    def begin(self) -> "InlineCapture":
        return InlineCapture(self._arena)


class InlineCapture(TapeCapture):
    def marked(self, function: Marked, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> Result:
        return function(*tensors, **options)
