"""Folders that live as long as their process: made for one owner, removed at its end, or at the next start.

The owner holds a lock on a file in the folder; the kernel lets go of it however the owner ends. Guards: a folder whose
owner lives is never removed, and a folder is seen under its name only once it is locked.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "forwardplane-"
_OWNER = "owner.lock"


@contextmanager
def private_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new folder that only this user may enter; what dead owners left beside it is removed first.

    Args:
        parent: where it is made; None: the system's temporary folder.

    Raises:
        OSError: it cannot be made.
    """
    place = _place(parent)
    remove_abandoned(place)
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=place))
    lock = -1
    folder = made
    try:
        lock = os.open(made / _OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = made.rename(place / made.name.removeprefix("."))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def remove_abandoned(parent: Path | None = None) -> int:
    """Remove this user's folders whose owners are gone; how many there were."""
    found = [folder for folder in _place(parent).glob(f"{_PREFIX}*") if _is_ours(folder)]
    return sum(_removed(folder) for folder in found)


def _place(parent: Path | None) -> Path:
    return Path(tempfile.gettempdir()) if parent is None else parent


def _is_ours(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid == os.geteuid() and folder.is_dir() and not folder.is_symlink()
    except OSError:
        return False


def _removed(folder: Path) -> bool:
    try:
        lock = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        os.close(lock)
