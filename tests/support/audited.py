"""Runs processes under an audit hook that writes down code that comes from data (`audit_site/sitecustomize.py`)."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SITE = Path(__file__).parent / "audit_site"


def audit_environment(log: Path) -> dict[str, str]:
    """What a child's environment needs for the hook."""
    paths = [str(SITE), os.environ.get("PYTHONPATH", "")]
    return {"AUDIT_LOG": str(log), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def findings(log: Path) -> tuple[list[str], list[str]]:
    """The processes that were watched, and what they did that they should not."""
    lines = log.read_text().splitlines() if log.exists() else []
    watched = [line for line in lines if line.startswith("watching ")]
    return watched, [line for line in lines if not line.startswith("watching ")]


class Audit:
    """What watched processes write into."""

    def __init__(self, log: Path) -> None:
        self._log = log

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Children that are started in the block are watched, and theirs."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in audit_environment(self._log).items():
                patch.setenv(name, value)
            yield


@contextlib.contextmanager
def audit() -> Iterator[Audit]:
    """What the watched processes did is asserted at the block's end."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "audit.log"
        yield Audit(log)
        watched, found = findings(log)
        assert watched, "no process was watched"
        assert found == [], found
