"""Exit codes of the command: bad usage, refusal and failure can be told apart by a script."""

from protos.wire.errors import CallerError, CapacityError, EngineError

OK = 0
FAILURE = 1
"""Something broke or no server answers."""
USAGE = 2
"""The command line is wrong; nothing was sent."""
REFUSED = 3
"""The server or a check said no: a value out of range, a model that is not there, a full queue."""
INTERRUPTED = 130


class WrongUsage(Exception):
    """The command line does not say what to do. One sentence; nothing was sent."""


def exit_code(error: EngineError) -> int:
    """The exit code that tells a refusal from a failure."""
    return REFUSED if isinstance(error, CallerError | CapacityError) else FAILURE
