"""Where the scheduler's epoch comes from, and when a refused attach may overtake it.

Knows nothing of gRPC. Guards: an epoch that this process has used is never used again by a later one (file source).
"""

import os
from pathlib import Path
from typing import Protocol

from protos.wire.errors import InvalidRequest


class EpochSource(Protocol):
    """One for the process, shared by all links."""

    def current(self) -> int:
        """The epoch to attach with."""
        ...

    def overtake(self, highest_epoch: int) -> bool:
        """Rise above an epoch that a worker has seen; False when only an outside authority may decide that."""
        ...


class WorkersEpoch:
    """Above the highest epoch that any worker has reported. For a single scheduler: nothing elects it."""

    def __init__(self) -> None:
        self._epoch = 1

    def current(self) -> int:
        """The epoch to attach with."""
        return self._epoch

    def overtake(self, highest_epoch: int) -> bool:
        """Rise to `highest_epoch + 1` if that is more; always allowed."""
        self._epoch = max(self._epoch, highest_epoch + 1)
        return True


class FileEpoch:
    """A counter in a file, raised once when this object is made. The file outlives the scheduler."""

    def __init__(self, path: Path) -> None:
        self._epoch = _raise_counter(path)

    def current(self) -> int:
        """The epoch to attach with."""
        return self._epoch

    def overtake(self, highest_epoch: int) -> bool:
        """Never rises: a worker that saw more means that another scheduler took over, or that the file went back."""
        return self._epoch > highest_epoch


def _raise_counter(path: Path) -> int:
    """One more than the file's number, which is on the disk before this returns.

    Raises:
        InvalidRequest: the file cannot be read or written, or holds something else than a number.
    """
    try:
        text = path.read_text(encoding="ascii").strip() if path.exists() else "0"
        if not text.isdecimal():
            message = f"epoch file {path.name} holds something else than a decimal number"
            raise InvalidRequest(message, field="epoch_file")
        epoch = int(text) + 1
        _write_durably(path, f"{epoch}\n")
    except (OSError, UnicodeDecodeError) as error:
        message = f"epoch file {path.name} cannot be used: {type(error).__name__}"
        raise InvalidRequest(message, field="epoch_file") from error
    return epoch


def _write_durably(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
