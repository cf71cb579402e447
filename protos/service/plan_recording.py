"""The file that plans and results are recorded in: framed entries, written and read here only.

    magic | version u32 | (length u32, crc of the piece u32, crc of these two u32, piece)*

The pieces are one zstandard stream, (kind u8, length u32, payload)*, and each ends where an entry ends. So a file that
was cut off gives every whole piece, and a changed bit is found before anything is made of it, with its place.
Each file can be read alone: it opens with who wrote it and, per worker, its attach answer and the tokens behind its
pages. It holds token ids, so it is made for its owner alone (mode 0600). Guards: reading never trusts a length or kind.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

import zstandard
from pydantic import BaseModel, ConfigDict, ValidationError

from protos.wire.errors import DataFault, InvalidRequest

MAGIC = b"FPRECORD"
VERSION = 2
MAX_ENTRY_BYTES = 1 << 30
MAX_NAME_BYTES = 255
_ZSTANDARD = 0xFD2FB528
"""What stands in the version's place in files of version 1."""
_VERSION = struct.Struct("<I")
_PIECE = struct.Struct("<III")
_FRAME = struct.Struct("<BI")
_MAX_WINDOW_BYTES = 1 << 27
_PIECE_BYTES = 1 << 14
"""Of entries; a piece is written when it has more."""
_FIELD = "recording"


class EntryKind(IntEnum):
    """What an entry is."""

    HEADER = 1
    ATTACH = 2
    PAGES = 3
    PLAN = 4
    RESULT = 5
    DROPPED = 6
    """Entries before this one are missing."""
    END = 7
    """The writer closed the file in order."""
    CUT = 8
    """Never written. Read where a file ends without its end; the payload says where, in words."""


_KINDS = frozenset(int(kind) for kind in EntryKind) - {EntryKind.CUT}


class RecordingHeader(BaseModel):
    """First entry of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    weights_fingerprint: str
    part: int
    """0 for the first file of a run, 1 for the one after the first rotation …"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry; `worker` is empty where none is meant."""

    kind: EntryKind
    worker: str
    payload: bytes


class RecordingWriter:
    """One file, from its creation to its end. Used by one thread."""

    def __init__(self, path: Path, header: RecordingHeader) -> None:
        """Create the file, which must not exist, readable by its owner only.

        Raises:
            OSError: it cannot be written.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file: BinaryIO = os.fdopen(descriptor, "wb")
        self._file.write(MAGIC + _VERSION.pack(VERSION))
        self._compressor = zstandard.ZstdCompressor(level=1).compressobj()
        self._piece = bytearray()
        self._num_plain = 0
        """Bytes of entries in the piece that is not written yet."""
        self.add(Entry(EntryKind.HEADER, "", header.model_dump_json().encode()))

    @property
    def num_bytes(self) -> int:
        """Size of the file so far, but for the last few entries."""
        return self._file.tell()

    def add(self, entry: Entry) -> None:
        """Append one entry."""
        name = entry.worker.encode()[:MAX_NAME_BYTES]
        head = _FRAME.pack(entry.kind, 1 + len(name) + len(entry.payload)) + bytes([len(name)]) + name
        for part in (head, entry.payload):
            self._piece += self._compressor.compress(part)
            self._num_plain += len(part)
        if self._num_plain > _PIECE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Make everything so far readable, even if the process is killed."""
        if self._num_plain:
            self._write_piece(zstandard.COMPRESSOBJ_FLUSH_BLOCK)

    def close(self) -> None:
        """End the file in order."""
        try:
            self.add(Entry(EntryKind.END, "", b""))
            self._write_piece(zstandard.COMPRESSOBJ_FLUSH_FINISH)
        finally:
            self._file.close()

    def _write_piece(self, mode: int) -> None:
        self._piece += self._compressor.flush(mode)
        sizes = struct.pack("<II", len(self._piece), zlib.crc32(self._piece))
        self._file.write(sizes + struct.pack("<I", zlib.crc32(sizes)))
        self._file.write(self._piece)
        self._file.flush()
        self._piece.clear()
        self._num_plain = 0


def is_recording(path: Path) -> bool:
    """Whether a file of this kind is at `path`, whole or not; an empty file is one that was never begun."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) in (MAGIC, b"")


def read_header(path: Path) -> RecordingHeader:
    """The header of the file at `path`.

    Raises:
        InvalidRequest: no recording, or one of another release.
        DataFault: damaged, or cut off before its header.
    """
    first = next(read_entries(path))
    if first.kind is EntryKind.CUT:
        raise DataFault(f"{path.name} is cut off before its header", field=_FIELD)
    if first.kind is not EntryKind.HEADER:
        raise DataFault(f"{path.name} does not begin with a header", field=_FIELD)
    try:
        return RecordingHeader.model_validate_json(first.payload)
    except ValidationError as error:
        raise DataFault(f"the header of {path.name} cannot be read", field=_FIELD) from error


def read_entries(path: Path) -> Iterator[Entry]:
    """The entries of the file at `path`, in order; the last is END, or CUT where the file ends before that.

    Raises:
        InvalidRequest: no recording, one of another release, or the file cannot be opened.
        DataFault: damaged; says at which byte, after how many entries.
    """
    try:
        with path.open("rb") as file:
            _check_version(file, path.name)
            yield from _entries(_Pieces(file, path.name))
    except OSError as error:
        raise InvalidRequest(f"{path.name} cannot be read: {error.strerror}", field=_FIELD) from error


def _check_version(file: BinaryIO, name: str) -> None:
    if file.read(len(MAGIC)) != MAGIC:
        raise InvalidRequest(f"{name} is no recording of plans", field=_FIELD)
    found = file.read(_VERSION.size)
    if len(found) < _VERSION.size:
        raise DataFault(f"{name} is cut off before its header", field=_FIELD)
    (version,) = _VERSION.unpack(found)
    if version != VERSION:
        shown = 1 if version == _ZSTANDARD else version
        message = f"{name} is a recording of version {shown}, this release reads {VERSION}"
        raise InvalidRequest(message, field=_FIELD)


def _entries(source: "_Pieces") -> Iterator[Entry]:
    while source.has_more():
        kind, length = _FRAME.unpack(source.take(_FRAME.size))
        if kind not in _KINDS or not 1 <= length <= MAX_ENTRY_BYTES:
            raise source.damage()
        content = source.take(length)
        begin = 1 + content[0]
        try:
            worker = content[1:begin].decode()
        except UnicodeDecodeError as error:
            raise source.damage() from error
        source.num_entries += 1
        yield Entry(EntryKind(kind), worker, content[begin:])
        if kind == EntryKind.END:
            return
    yield Entry(EntryKind.CUT, "", f"at byte {source.offset}, after {source.num_entries} entries".encode())


class _Pieces:
    """What a file holds, piece by piece, each checked before it is unpacked."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.num_entries = 0
        """Taken so far, for messages."""
        self.offset = file.tell()
        """Where the piece begins that was read last, or that the file ends in."""
        self._file = file
        self._name = name
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
        self._plain = bytearray()

    def has_more(self) -> bool:
        """Whether another entry begins; False: the file ends here.

        Raises:
            DataFault: damaged.
        """
        while not self._plain:
            piece = self._next_piece()
            if piece is None:
                return False
            try:
                self._plain += self._decompressor.decompress(piece)
            except zstandard.ZstdError as error:
                raise self.damage() from error
        return True

    def take(self, size: int) -> bytes:
        """The next `size` bytes.

        Raises:
            DataFault: damaged, or there are not that many in this piece.
        """
        if len(self._plain) < size:
            raise self.damage()
        taken = bytes(self._plain[:size])
        del self._plain[:size]
        return taken

    def damage(self) -> DataFault:
        """The error that says where."""
        message = f"{self._name} is damaged in what begins at byte {self.offset}, after {self.num_entries} entries"
        return DataFault(message, field=_FIELD)

    def _next_piece(self) -> bytes | None:
        self.offset = self._file.tell()
        head = self._file.read(_PIECE.size)
        if len(head) < _PIECE.size:
            return None
        length, crc, head_crc = _PIECE.unpack(head)
        if zlib.crc32(head[: _PIECE.size - 4]) != head_crc:
            raise self.damage()
        piece = self._file.read(length)
        if len(piece) < length:
            return None
        if zlib.crc32(piece) != crc:
            raise self.damage()
        return piece
