import pytest

from protos.wire.errors import InvalidRequest
from scheduler_svc.links.epoch import FileEpoch, WorkersEpoch


def test_the_workers_source_rises_above_what_workers_have_seen():
    source = WorkersEpoch()
    assert source.current() == 1
    assert source.overtake(6)
    assert source.current() == 7
    assert source.overtake(2)
    assert source.current() == 7


def test_every_start_has_a_higher_epoch_from_the_file(tmp_path):
    path = tmp_path / "epoch"
    assert [FileEpoch(path).current() for _ in range(3)] == [1, 2, 3]
    assert path.read_text() == "3\n"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_source_does_not_overtake(tmp_path):
    source = FileEpoch(tmp_path / "epoch")
    assert not source.overtake(1)
    assert source.current() == 1


@pytest.mark.parametrize("content", ["", "one", "-1", "1.5", "\xff"])
def test_a_file_that_holds_no_number_is_refused_and_kept(tmp_path, content):
    path = tmp_path / "epoch"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(InvalidRequest, match="epoch"):
        FileEpoch(path)
    assert path.read_text(encoding="latin-1") == content


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(InvalidRequest) as caught:
        FileEpoch(tmp_path / "absent" / "epoch")
    assert caught.value.field == "epoch_file"
