"""A full disk: nothing on the way of a request writes to one, and neither does a process that is started again."""

import errno
import subprocess
import tempfile
from pathlib import Path

import pytest

from protos.client.fetch_model import fetch_model
from protos.client.simulated_model import SIMULATED_MODEL
from tests.support.fault_cycles import FaultCycles, Strike
from tests.support.struck_group import struck_group

pytestmark = pytest.mark.timeout(120)
WORKERS = 2
SIZE_BYTES = 1 << 20


@pytest.fixture
def small_disk(monkeypatch):
    """The place for temporary files, of a short name: sockets are made in it."""
    folder = Path(tempfile.mkdtemp(prefix="small"))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", folder], check=False)
    if mounted.returncode:
        folder.rmdir()
        pytest.skip("a tmpfs cannot be mounted here")
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)
    folder.rmdir()


def fill(folder):
    with (folder / "filler").open("wb", buffering=0) as filler:
        while is_written(filler):
            pass


def is_written(file):
    try:
        file.write(bytes(4096))
    except OSError as error:
        return error.errno != errno.ENOSPC
    return True


async def test_a_full_tmpfs_costs_no_caller_a_token(tmp_path, small_disk):
    cache = tmp_path / "models"
    cache.mkdir()
    fetch_model(SIMULATED_MODEL, cache=cache)
    with struck_group(workers=WORKERS, cache=cache) as group:
        fill(small_disk)
        report = await FaultCycles(group, seed=3).run([Strike.VANISH, Strike.KILL])
        with (small_disk / "more").open("wb", buffering=0) as more:
            assert not is_written(more)
    assert not report.wrong, report.text() + "\n" + "\n".join(report.wrong)
    assert report.requests
