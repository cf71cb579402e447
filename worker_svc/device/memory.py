"""How much memory is free: of a device, of the machine, and below the limits of the container; and how much is ours.

Readings only. Guards: what a container may still use is never above what its control groups, or those around it, allow.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class _GroupFiles:
    """Where one version of control groups says limit, use, and which part of the use is cache that can go."""

    mount: str
    limit: str
    used: str
    cache: str
    """Key in `memory.stat`."""


_VERSION_1 = _GroupFiles(
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", cache="total_inactive_file"
)
_VERSION_2 = _GroupFiles("sys/fs/cgroup", "memory.max", "memory.current", cache="inactive_file")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a running worker can say of its device's memory. Any thread."""

    device: torch.device
    weights_bytes: int = field(kw_only=True)

    def free_bytes(self) -> int:
        """What nobody has now. Gives nothing back, unlike `free_bytes` at a start: plans are running."""
        return free_host_bytes() if self.device.type == "cpu" else int(torch.cuda.mem_get_info(self.device)[0])


def free_bytes(device: torch.device) -> int:
    """Memory of the device that a pool could take now, after what nobody refers to was given back."""
    gc.collect()
    if device.type == "cpu":
        return free_host_bytes()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def own_bytes(device: torch.device) -> int:
    """Memory of the device that this process holds and others therefore cannot; mapped files do not count."""
    if device.type == "cpu":
        return int(psutil.Process().memory_info().rss) - _mapped_file_bytes()
    return int(torch.cuda.memory_reserved(device))


def _mapped_file_bytes() -> int:
    """Resident pages of files, which the system takes back when it needs them. 0 where it does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile:"))


def free_host_bytes(root: Path = _ROOT) -> int:
    """Memory of the machine that this process may still use.

    Args:
        root: where `proc` and `sys` are.
    """
    return min(int(psutil.virtual_memory().available), *_rooms(root))


def _rooms(root: Path) -> Iterator[int]:
    """What each control group that holds this process has left; always one number at least."""
    yield int(psutil.virtual_memory().total)
    for files, group in _groups(root):
        mount = root / files.mount
        # In a container the path is often the host's and the mount is the container's own group.
        inner = mount / group if (mount / group / files.limit).is_file() else mount
        for folder in (inner, *inner.parents):
            room = _room(folder, files)
            if room is not None:
                yield room
            if folder == mount:
                break


def _groups(root: Path) -> Iterator[tuple[_GroupFiles, str]]:
    """Lines are `number:controllers:/path`; version 2 has number 0 and names no controller."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield _VERSION_2, path.strip("/")
        elif "memory" in controllers.split(","):
            yield _VERSION_1, path.strip("/")


def _room(folder: Path, files: _GroupFiles) -> int | None:
    """None: the group has no limit, or does not say."""
    try:
        limit = (folder / files.limit).read_text().strip()
        used = int((folder / files.used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return None if limit == "max" else max(0, int(limit) - used + int(stat.get(files.cache, 0)))
    except (OSError, ValueError):
        return None
