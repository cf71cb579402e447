"""Marked calls: work that a captured graph leaves to run eagerly, such as attention over pages that change each step.

And work beside other work: what stands between two of them and their join may run at once where there are streams.
Both go straight through, unless a capture has taken the marks over. Lives as long as the context that the layers see;
one thread.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from protos.wire.errors import InternalFault

Result = Tensor | tuple[Tensor, ...] | None
Marked = Callable[..., Result]


def parts_of(result: Result) -> tuple[Tensor, ...]:
    """The tensors that a marked call returned."""
    if result is None:
        return ()
    return (result,) if isinstance(result, Tensor) else result


def rebuilt(like: Result, parts: tuple[Tensor, ...]) -> Result:
    """`parts` in the structure of `like`."""
    if like is None:
        return None
    return parts[0] if isinstance(like, Tensor) else parts


def copy_result(made: Result, into: Result) -> None:
    """Copy what a replayed marked call returned over what the captured one did.

    Raises:
        InternalFault: its structure, shapes or dtypes are unlike those of the capture.
    """
    sources, targets = parts_of(made), parts_of(into)
    if [(part.shape, part.dtype) for part in sources] != [(part.shape, part.dtype) for part in targets]:
        raise InternalFault(
            f"a marked call gave {_described(sources)} at a replay and {_described(targets)} at the capture"
        )
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _described(parts: tuple[Tensor, ...]) -> str:
    return ", ".join(f"{tuple(part.shape)} of {part.dtype}" for part in parts) or "nothing"


class BreakPolicy(Protocol):
    """Who decides what a marked call does while a capture is on."""

    def marked(self, function: Marked, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> Result:
        """Do `function(*tensors, **options)` in its own way, after all work so far."""
        ...

    def beside(self) -> AbstractContextManager[None]:
        """See `BreakPoints.beside`."""
        ...

    def join(self) -> None:
        """See `BreakPoints.join`."""
        ...


class InOrder:
    """The part of a `BreakPolicy` where nothing runs at once: the work goes on in the order of the program."""

    def beside(self) -> AbstractContextManager[None]:
        """See `BreakPoints.beside`."""
        return nullcontext()

    def join(self) -> None:
        """See `BreakPoints.join`."""


class BreakPoints:
    """Where marked calls go."""

    def __init__(self) -> None:
        self._handler: BreakPolicy | None = None

    def call(self, function: Marked, *tensors: Tensor, **options: Any) -> Result:
        """Call a marked function.

        What changes from step to step must be read inside `function`: a replay calls it with the captured arguments,
        the tensors holding the new values at the same addresses.
        """
        if self._handler is None:
            return function(*tensors, **options)
        return self._handler.marked(function, tensors, options)

    def beside(self) -> AbstractContextManager[None]:
        """Work inside may run at the same time as what follows, until it is joined.

        A marked call and the end of the graph join it too. Until then its results are not read, and tensors that it
        reads are neither written nor let go.
        """
        return nullcontext() if self._handler is None else self._handler.beside()

    def join(self) -> None:
        """What follows comes after all work beside it so far."""
        if self._handler is not None:
            self._handler.join()

    @contextmanager
    def handled_by(self, handler: BreakPolicy) -> Iterator[None]:
        """Hand marked calls to `handler`. Marked calls inside one that it runs go straight through."""
        before, self._handler = self._handler, handler
        try:
            yield
        finally:
            self._handler = before

    @contextmanager
    def straight(self) -> Iterator[None]:
        """Marked calls go straight through."""
        before, self._handler = self._handler, None
        try:
            yield
        finally:
            self._handler = before
