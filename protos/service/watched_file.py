"""Files that a process reads again when they change: how that is seen, and reading no more than a limit."""

from pathlib import Path
from typing import TypeAlias

FileStamp: TypeAlias = tuple[int, int, int]
"""Time of its last change in nanoseconds, bytes, inode: another one where there may be something new."""


def file_stamp(path: Path) -> FileStamp | None:
    """Of the file as it is now; None: it is not there, or cannot be looked at."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def bounded_bytes(path: Path, *, most: int) -> bytes | None:
    """What is in the file; None: more than `most` bytes.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    return content if len(content) <= most else None
