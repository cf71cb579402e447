"""What goes wrong in the native kernels. Plain types: the caller turns them into its own taxonomy."""

from dataclasses import dataclass
from enum import IntEnum


class KernelStatus(IntEnum):
    """Codes of the C interface."""

    OK = 0
    INVALID = 1
    MEMORY = 2
    UNSUPPORTED = 3
    INTERNAL = 4


class KernelError(Exception):
    """A call that the library refused. The message names the argument, its value and the limit."""

    def __init__(self, message: str, *, status: KernelStatus) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class NativeUnavailable:
    """Why there is no native library here. One line, for the start message; serving goes on without it, slower."""

    reason: str
