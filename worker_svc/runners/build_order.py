"""The one order in which a device side is built.

A later part reads an earlier one, and what is captured may call all of them. Knows no part. Guards: another order
raises, nothing is built twice.
"""

from enum import IntEnum

from protos.wire.errors import InternalFault


class BuildStep(IntEnum):
    """What exists."""

    NOTHING = 0
    WEIGHTS = 1
    POOLS = 2
    TRANSLATOR = 3
    CANARY = 4
    ATTENTION = 5
    RUNNERS = 6
    GRAPHS = 7


class BuildOrder:
    """How far one device side is built."""

    def __init__(self) -> None:
        self._done = BuildStep.NOTHING

    def enter(self, step: BuildStep) -> None:
        """Begin `step`. One that failed is not tried again.

        Raises:
            InternalFault: it is not the next one.
        """
        if step != self._done + 1:
            message = f"{step.name} was to be built after {BuildStep(step - 1).name}, what exists is {self._done.name}"
            raise InternalFault(message)
        self._done = step
