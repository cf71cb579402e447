"""Where a recording may be written."""

from pathlib import Path

import pytest

from protos.service.plan_recording import MAGIC
from protos.wire.errors import InvalidRequest
from scheduler_svc.links.recorder import PlanRecorder, RecordingSettings


def settings(path: Path) -> RecordingSettings:
    return RecordingSettings(path=path, max_file_bytes=1 << 20, max_files=3, model="m", weights_fingerprint="w")


@pytest.mark.parametrize("content", [None, b"my notes"])
def test_nothing_but_a_recording_is_moved_out_of_the_way(tmp_path: Path, content: bytes | None) -> None:
    target = tmp_path / "kept"
    if content is None:
        target.mkdir()
    else:
        target.write_bytes(content)
    with pytest.raises(InvalidRequest, match="is no recording"):
        PlanRecorder(settings(target)).start()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]
    assert target.is_dir() if content is None else target.read_bytes() == content


def test_an_earlier_recording_becomes_an_older_one(tmp_path: Path) -> None:
    target = tmp_path / "run.fprec"
    target.write_bytes(MAGIC + b"rest")
    recorder = PlanRecorder(settings(target))
    recorder.start()
    recorder.stop()
    assert (tmp_path / "run.fprec.1").read_bytes() == MAGIC + b"rest"
