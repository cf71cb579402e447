"""A private folder ends with its owner, however that ends, and never before."""

import signal
import subprocess
import sys

import pytest

from protos.service.private_folder import private_folder, remove_abandoned

OWNER = """
import sys, time
from pathlib import Path
from protos.service.private_folder import private_folder
with private_folder(Path(sys.argv[1])) as folder:
    (folder / "core.sock").touch()
    print(folder, flush=True)
    time.sleep(60)
"""


def folders(place):
    return sorted(path.name for path in place.iterdir())


def test_it_is_the_users_alone_and_gone_afterwards(tmp_path):
    with private_folder(tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert folder.parent == tmp_path
        assert remove_abandoned(tmp_path) == 0
        assert folder.is_dir()
    assert folders(tmp_path) == []


def test_it_is_gone_when_the_block_fails(tmp_path):
    with pytest.raises(KeyError), private_folder(tmp_path):
        raise KeyError
    assert folders(tmp_path) == []


def test_a_killed_owners_folder_is_removed_at_the_next_start_and_a_living_ones_is_not(tmp_path):
    owners = [
        subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    killed, living = (owner.stdout.readline().strip() for owner in owners)
    owners[0].send_signal(signal.SIGKILL)
    owners[0].wait()
    try:
        with private_folder(tmp_path) as ours:
            left = {str(path) for path in tmp_path.iterdir()}
            assert left == {living, str(ours)}
            assert killed not in left
    finally:
        owners[1].kill()
        for owner in owners:
            owner.wait()
            owner.stdout.close()
    assert remove_abandoned(tmp_path) == 1
    assert folders(tmp_path) == []


def test_what_is_not_such_a_folder_is_left_alone(tmp_path):
    (tmp_path / "forwardplane-notes").mkdir()
    (tmp_path / "forwardplane-file").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner.lock").touch()
    (tmp_path / "forwardplane-link").symlink_to(elsewhere)
    before = folders(tmp_path)
    assert remove_abandoned(tmp_path) == 0
    assert folders(tmp_path) == before
    assert folders(elsewhere) == ["owner.lock"]


def test_a_place_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(OSError, match="No such file"), private_folder(tmp_path / "absent"):
        raise AssertionError("not reached")
