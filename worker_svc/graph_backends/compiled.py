"""torch.compile, piece by piece between marked calls: the classic comparison. Slow to prepare, so off unless asked for.

Compiling traces the work's Python once; marked calls are left out of it and run as they are. There is no device graph:
a replay calls the compiled pieces on the same inputs and copies what they give into the kept outputs.

What is compiled belongs to the work's code, not to one call of it: a preparation compiles by running work of the same
code beside the device, and the capture that follows finds the pieces made.
"""

import shutil
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from worker_svc.device.break_points import BreakPoints, InOrder, Marked, Result
from worker_svc.device.device_graph import CaptureError
from worker_svc.graph_backends.base import KeyedBackend, Outputs, Pause, Preparation, Work, no_pause
from worker_svc.graph_backends.kept_tensors import KeptTensors

_COMPILERS = ("c++", "g++", "clang++")


def why_not_compiled() -> str | None:
    """What keeps torch.compile from working here; None if nothing does."""
    if not any(shutil.which(compiler) for compiler in _COMPILERS):
        return f"no C++ compiler is installed (looked for {', '.join(_COMPILERS)})"
    return None


@dataclass(frozen=True, slots=True)
class _Captured:
    work: Callable[[], Outputs]
    outputs: Outputs


class CompiledBackend(KeyedBackend[_Captured]):
    """A `GraphBackend`."""

    name = "compiled"

    def __init__(self, *, kept: KeptTensors, breaks: BreakPoints) -> None:
        super().__init__()
        self._kept = kept
        self._breaks = breaks
        self._uncompiled = _Uncompiled()

    def preparation(self, work: Work, *, breaks: BreakPoints) -> Preparation:
        """See `GraphBackend.preparation`: the compiling."""

        def compile_work() -> None:
            _check_compiler()
            with breaks.handled_by(self._uncompiled), _quiet():
                _compiled(work)()

        return compile_work

    def capture(self, key: Hashable, work: Work, *, pause: Pause = no_pause) -> Outputs:
        """See `GraphBackend.capture`."""
        _check_compiler()
        for index, made in enumerate(work()):
            self._kept.reserve(made, place=index)
        pause()
        with _quiet():
            compiled = _compiled(work)
            outputs = self._run(compiled)
        self._captured[key] = _Captured(compiled, outputs)
        return outputs

    def replay(self, key: Hashable) -> Outputs:
        """See `GraphBackend.replay`."""
        return self._run(self._captured[key].work)

    def _run(self, compiled: Callable[[], Outputs]) -> Outputs:
        with self._breaks.handled_by(self._uncompiled):
            return tuple(self._kept.copy(made, place=index) for index, made in enumerate(compiled()))


def _compiled(work: Work) -> Work:
    """No processes that compile for it: they would stay, and take the cores from serving."""
    return torch.compile(work, dynamic=False, options={"compile_threads": 1})


def _check_compiler() -> None:
    problem = why_not_compiled()
    if problem is not None:
        raise CaptureError(f"torch.compile cannot be used: {problem}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch's compiler uses parts that torch deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


class _Uncompiled(InOrder):
    """Runs marked calls outside the compiled pieces."""

    def __init__(self) -> None:
        # Here and not above the class: it loads torch's compiler, a second of every start that compiles nothing.
        self.marked = torch.compiler.disable(_run_marked)


def _run_marked(function: Marked, tensors: tuple[torch.Tensor, ...], options: dict[str, Any]) -> Result:
    """See `BreakPolicy.marked`."""
    return function(*tensors, **options)
