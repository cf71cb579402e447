"""The file of recorded plans: what goes in comes out, only its owner may read it, damage is named and never trusted."""

import contextlib
import os
import random
import re
import stat
import struct
import zlib

import numpy as np
import pytest
import zstandard

from protos.service.plan_recording import (
    MAGIC,
    Entry,
    EntryKind,
    RecordingHeader,
    RecordingWriter,
    read_entries,
    read_header,
)
from protos.service.recording_payloads import (
    Attachment,
    LivePages,
    RecentTokens,
    decode_attachment,
    decode_pages,
    encode_attachment,
    encode_pages,
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
    }
    recent = {name: np.array([number]) for number, name in enumerate(RecentTokens.__dataclass_fields__)}
    recent |= {name: changes.pop(name) for name in list(changes) if name in recent}
    return LivePages(recent=RecentTokens(**recent), **(values | changes))


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
    for name in ("is_complete", "pages", "parents", "indptr", "token_ids"):
        np.testing.assert_array_equal(getattr(found, name), getattr(pages, name))
    for name in RecentTokens.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(found.recent, name), getattr(pages.recent, name))


@pytest.mark.parametrize(
    "changes",
    [
        {"parents": np.array([0])},
        {"token_ids": np.zeros(9, int)},
        {"token_ids": np.zeros(3)},
        {"handles": np.zeros(5, int)},
        {"pages": np.zeros((2, 2), int)},
    ],
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
    size = path.stat().st_size
    first, *middle, last = read_entries(path)
    assert (first.kind, middle) == (EntryKind.HEADER, ENTRIES)
    assert (last.kind, last.payload.decode()) == (EntryKind.CUT, f"at byte {size}, after 41 entries")


def test_wherever_a_file_is_cut_the_whole_entries_before_it_are_read(tmp_path):
    content = written(tmp_path / "r").read_bytes()
    path, found = tmp_path / "cut", []
    for size in range(len(MAGIC) + 4, len(content), 37):
        path.write_bytes(content[:size])
        *entries, last = read_entries(path)
        assert last.kind is EntryKind.CUT
        assert [entry for entry in entries if entry.kind is EntryKind.PLAN] == ENTRIES[: max(len(entries) - 1, 0)]
        found.append(len(entries))
    assert found == sorted(found)
    assert len(set(found)) > 1


def test_every_changed_bit_is_found_with_its_place(tmp_path):
    content = written(tmp_path / "r").read_bytes()
    path, chosen = tmp_path / "flipped", random.Random(7)
    for place in (*range(60), *range(60, len(content), 11)):
        changed = bytearray(content)
        changed[place] ^= 1 << chosen.randrange(8)
        path.write_bytes(changed)
        with pytest.raises((DataFault, InvalidRequest)) as caught:
            list(read_entries(path))
        if place >= len(MAGIC) + 4:
            begin = int(re.search(r"at byte (\d+)", str(caught.value))[1])
            assert begin <= place
            assert isinstance(caught.value, DataFault)


def test_something_else_is_no_recording(tmp_path):
    path = tmp_path / "other"
    path.write_bytes(b"hello, this is text")
    with pytest.raises(InvalidRequest, match="other is no recording"):
        read_header(path)
    with pytest.raises(InvalidRequest, match="missing cannot be read"):
        read_header(tmp_path / "missing")


@pytest.mark.parametrize(("number", "shown"), [(99, "99"), (0xFD2FB528, "1")])
def test_another_version_is_refused(tmp_path, number, shown):
    (tmp_path / "r").write_bytes(MAGIC + number.to_bytes(4, "little") + b"rest")
    with pytest.raises(InvalidRequest, match=f"version {shown}, this release reads 2"):
        read_header(tmp_path / "r")
    (tmp_path / "r").write_bytes(MAGIC + b"\x02")
    with pytest.raises(DataFault, match="cut off before its header"):
        read_header(tmp_path / "r")


def test_whatever_stands_in_a_whole_file_the_answer_is_of_the_taxonomy(tmp_path):
    """Damage that every check sum agrees with."""
    content = written(tmp_path / "r").read_bytes()
    pieces = zstandard.ZstdDecompressor().decompressobj()
    plain = b"".join(pieces.decompress(piece) for piece in pieces_of(content))
    chosen = random.Random(5)
    path = tmp_path / "damaged"
    for _ in range(100):
        changed = bytearray(plain)
        for _ in range(chosen.randint(1, 4)):
            changed[chosen.randrange(len(changed))] = chosen.randrange(256)
        piece = zstandard.compress(bytes(changed[: chosen.choice([len(changed), chosen.randrange(len(changed))])]))
        sizes = struct.pack("<II", len(piece), zlib.crc32(piece))
        path.write_bytes(content[:12] + sizes + struct.pack("<I", zlib.crc32(sizes)) + piece)
        with contextlib.suppress(DataFault, InvalidRequest):
            read_header(path)
            for _ in read_entries(path):
                pass


def pieces_of(content):
    place = 12
    while place < len(content):
        (length,) = struct.unpack_from("<I", content, place)
        yield content[place + 12 : place + 12 + length]
        place += 12 + length
