"""Downloads one pinned wheel with pip, its dependencies left out. Reports progress; installs nothing."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from protos.wire.errors import UnavailableError

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_LAST_LINES = 3


def download_wheel(package: str, version: str, *, into: Path, progress: Callable[[str], None]) -> Path:
    """The downloaded wheel's path.

    Raises:
        UnavailableError: pip cannot be run or the index did not deliver.
    """
    requirement = f"{package}=={version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--progress-bar", "raw"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(into), requirement]
    progress(f"downloading {requirement}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            lines = _follow(process.stdout, requirement, progress)
        except BaseException:
            process.kill()
            raise
    wheels = sorted(into.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        last = lines[-1] if lines else "no output"
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), last)
        raise UnavailableError(f"pip could not download {requirement}: {reason[:300]}", field="name")
    return wheels[0]


def _follow(output: Iterable[str], requirement: str, progress: Callable[[str], None]) -> list[str]:
    """Tell the progress that pip prints; the last other lines, for an error."""
    lines: list[str] = []
    for line in output:
        found = _PROGRESS.search(line)
        if found is None:
            lines = [*lines[-_LAST_LINES + 1 :], line.strip()]
        elif (total := int(found[2])) > 0:
            progress(f"downloading {requirement}: {int(found[1]) * 100 // total} % of {total >> 20} MiB")
    return lines
