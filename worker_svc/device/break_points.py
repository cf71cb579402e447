"""Marked calls: work that a captured graph leaves to run eagerly, such as attention over pages that change each step.

A marked call goes straight through, unless a capture has taken the marks over. Lives as long as the context that the
layers see; one thread.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

Result = Tensor | tuple[Tensor, ...] | None
Marked = Callable[..., Result]


class BreakPolicy(Protocol):
    """Who decides what a marked call does while a capture is on."""

    def marked(self, function: Marked, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> Result:
        """Do `function(*tensors, **options)` in its own way."""
        ...


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
