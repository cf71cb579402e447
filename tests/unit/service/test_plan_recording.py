"""The file of recorded plans: what goes in comes out, only its owner may read it, damage is named and never trusted."""

import contextlib
import os
import random
import stat

import numpy as np
import pytest
import zstandard

from protos.service.plan_recording import (
    MAGIC,
    Attachment,
    Entry,
    EntryKind,
    LivePages,
    RecordingHeader,
    RecordingWriter,
    decode_attachment,
    decode_pages,
    encode_attachment,
    encode_pages,
    read_entries,
    read_header,
)
from protos.wire.errors import DataFault, InvalidRequest
from tests.support.plans import make_info

HEADER = RecordingHeader(model="tiny", weights_fingerprint="w", part=3)
ENTRIES = [Entry(EntryKind.PLAN, f"worker:{n % 2}", os.urandom(200) * (n % 5)) for n in range(40)]


def written(path, *, closed=True):
    writer = RecordingWriter(path, HEADER)
    for entry in ENTRIES:
        writer.add(entry)
    if closed:
        writer.close()
    else:
        writer.flush()
        writer._file.close()
    return path


def live_pages(**changes):
    values = {
        "is_complete": True,
        "pages": np.array([5, 2], np.int32),
        "parents": np.array([0, 5], np.int32),
        "indptr": np.array([0, 2, 3]),
        "token_ids": np.array([7, 8, 9], np.int32),
        "result_seqs": np.array([4], np.uint64),
        "result_indptr": np.array([0, 1]),
        "result_tokens": np.array([-1], np.int32),
    }
    return LivePages(**(values | changes))


def test_entries_come_back_in_order_behind_the_header(tmp_path):
    path = written(tmp_path / "r")
    first, *middle, last = read_entries(path)
    assert first.kind is EntryKind.HEADER
    assert middle == ENTRIES
    assert last.kind is EntryKind.END
    assert read_header(path) == HEADER


def test_only_the_owner_may_read_and_no_file_is_overwritten(tmp_path):
    before = os.umask(0)
    try:
        path = written(tmp_path / "r")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        RecordingWriter(path, HEADER)


def test_attachment_and_pages_survive_their_bytes():
    attachment = Attachment(epoch=2**63, term=4, info=make_info())
    assert decode_attachment(encode_attachment(attachment)) == attachment
    pages = live_pages()
    found = decode_pages(encode_pages(pages))
    for name in LivePages.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(found, name), getattr(pages, name))


@pytest.mark.parametrize(
    "changes", [{"parents": np.array([0])}, {"token_ids": np.zeros(9)}, {"result_tokens": np.zeros(5)}]
)
def test_pages_that_contradict_themselves_are_refused(changes):
    with pytest.raises(DataFault, match="contradicts itself"):
        decode_pages(encode_pages(live_pages(**changes)))


@pytest.mark.parametrize("payload", [b"", b"x" * 30, encode_pages(live_pages())[:200]])
def test_entries_that_cannot_be_read_are_data_faults(payload):
    with pytest.raises(DataFault):
        decode_pages(payload)


def test_a_file_that_was_cut_off_gives_what_it_holds_and_says_where_it_ends(tmp_path):
    path = written(tmp_path / "r", closed=False)
    found = []
    with pytest.raises(DataFault, match=r"r ends after 41 entries"):
        found.extend(read_entries(path))
    entries = read_entries(path)
    next(entries)
    assert [next(entries) for _ in ENTRIES] == ENTRIES


def test_something_else_is_no_recording(tmp_path):
    path = tmp_path / "other"
    path.write_bytes(b"hello, this is text")
    with pytest.raises(InvalidRequest, match="other is no recording"):
        read_header(path)
    with pytest.raises(InvalidRequest, match="missing cannot be read"):
        read_header(tmp_path / "missing")


def test_another_version_is_refused(tmp_path):
    RecordingWriter(tmp_path / "r", RecordingHeader(version=99, model="m", weights_fingerprint="", part=0)).close()
    with pytest.raises(InvalidRequest, match="version 99"):
        read_header(tmp_path / "r")


def test_whatever_is_damaged_the_answer_is_of_the_taxonomy(tmp_path):
    content = written(tmp_path / "r").read_bytes()
    plain = zstandard.ZstdDecompressor().stream_reader(content[len(MAGIC) :]).read()
    chosen = random.Random(5)
    path = tmp_path / "damaged"
    for number in range(150):
        changed = bytearray(plain if number % 2 else content)
        for _ in range(chosen.randint(1, 4)):
            changed[chosen.randrange(len(changed))] = chosen.randrange(256)
        whole = MAGIC + zstandard.compress(bytes(changed)) if number % 2 else bytes(changed)
        path.write_bytes(whole[: chosen.choice([len(whole), chosen.randrange(len(whole))])])
        with contextlib.suppress(DataFault, InvalidRequest):
            read_header(path)
            for _ in read_entries(path):
                pass
