"""A tmpfs of a mebibyte as the place for temporary files of processes that are started meanwhile. Needs root."""

import contextlib
import errno
import io
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

_SIZE_BYTES = 1 << 20


class NoSmallDisk(Exception):
    """A tmpfs cannot be mounted here."""


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """Its folder, of a short name: sockets are made in it.

    Raises:
        NoSmallDisk: this user may not.
    """
    folder = Path(tempfile.mkdtemp(prefix="small"))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_SIZE_BYTES}", "tmpfs", folder], check=False)
    if mounted.returncode:
        folder.rmdir()
        raise NoSmallDisk("a tmpfs cannot be mounted here")
    try:
        with mock.patch.dict(os.environ, {"TMPDIR": str(folder)}):
            yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
        folder.rmdir()


def fill(folder: Path) -> None:
    """Until nothing more can be written."""
    with (folder / "filler").open("ab", buffering=0) as filler:
        while _is_written(filler):
            pass


def is_full(folder: Path) -> bool:
    with (folder / "more").open("wb", buffering=0) as more:
        return not _is_written(more)


def _is_written(file: io.FileIO) -> bool:
    try:
        file.write(bytes(4096))
    except OSError as error:
        return error.errno != errno.ENOSPC
    return True
