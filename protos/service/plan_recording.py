"""The file that plans and results are recorded in: framed entries in one zstandard stream, written and read here only.

    magic | zstd( (kind u8, length u32, payload)* )

Each file can be read alone: it opens with who wrote it and, per worker, its attach answer and the tokens behind its
pages. It holds token ids, so it is made for its owner alone (mode 0600). Guards: reading never trusts a length or kind.
"""

import io
import os
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

import numpy as np
import zstandard
from pydantic import BaseModel, ConfigDict, ValidationError

from protos.forwardplane.v1.worker_pb2 import AttachReply
from protos.wire.codec import worker_info_from_proto, worker_info_to_proto
from protos.wire.errors import DataFault, InvalidRequest
from protos.wire.worker_info import WorkerInfo

MAGIC = b"FPRECORD"
VERSION = 1
MAX_ENTRY_BYTES = 1 << 30
MAX_NAME_BYTES = 255
_FRAME = struct.Struct("<BI")
_PAIR = struct.Struct("<QQ")
_READ_BYTES = 1 << 13
_MAX_WINDOW_BYTES = 1 << 27
_FLUSH_BYTES = 1 << 14
"""Of entries; the compressor holds back no more."""
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


class RecordingHeader(BaseModel):
    """First entry of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = VERSION
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """Payload of ATTACH."""

    epoch: int
    term: int
    info: WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LivePages:
    """Payload of PAGES: the tokens behind every page that a later plan may read, parents before children."""

    is_complete: bool
    """False: something was lost before this file; pages may be missing."""
    pages: np.ndarray
    """i32 [n]"""
    parents: np.ndarray
    """i32 [n]: the page of the same sequence before it; 0: none."""
    indptr: np.ndarray
    """i64 [n + 1]"""
    token_ids: np.ndarray
    """i32 [indptr[n]]"""
    result_seqs: np.ndarray
    """u64 [k]: the last plans answered before this file."""
    result_indptr: np.ndarray
    """i64 [k + 1]"""
    result_tokens: np.ndarray
    """i32: of each of their rows; -1 where there was none."""


_PAGE_ARRAYS = ("pages", "parents", "indptr", "token_ids", "result_seqs", "result_indptr", "result_tokens")


def encode_attachment(attachment: Attachment) -> bytes:
    """Bytes of an ATTACH."""
    head = _PAIR.pack(attachment.epoch, attachment.term)
    return head + worker_info_to_proto(attachment.info).SerializeToString(deterministic=True)


def decode_attachment(payload: bytes) -> Attachment:
    """The ATTACH in `payload`.

    Raises:
        EngineError: malformed.
    """
    if len(payload) < _PAIR.size:
        raise DataFault("an attach entry is too short", field=_FIELD)
    epoch, term = _PAIR.unpack_from(payload)
    reply = AttachReply()
    try:
        reply.ParseFromString(payload[_PAIR.size :])
    except ValueError as error:
        raise DataFault("an attach entry cannot be read", field=_FIELD) from error
    return Attachment(epoch=epoch, term=term, info=worker_info_from_proto(reply))


def encode_pages(live: LivePages) -> bytes:
    """Bytes of a PAGES."""
    buffer = io.BytesIO()
    arrays = {name: getattr(live, name) for name in _PAGE_ARRAYS}
    np.savez(buffer, is_complete=np.array(live.is_complete), **arrays)
    return buffer.getvalue()


def decode_pages(payload: bytes) -> LivePages:
    """The PAGES in `payload`.

    Raises:
        DataFault: malformed.
    """
    try:
        with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
            live = LivePages(is_complete=bool(arrays["is_complete"]), **{name: arrays[name] for name in _PAGE_ARRAYS})
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataFault("a pages entry cannot be read", field=_FIELD) from error
    sizes = (len(live.pages) == len(live.parents) == len(live.indptr) - 1, live.indptr[-1] == len(live.token_ids))
    if not all(sizes) or live.result_indptr[-1] != len(live.result_tokens):
        raise DataFault("a pages entry contradicts itself", field=_FIELD)
    return live


class RecordingWriter:
    """One file, from its creation to its end. Used by one thread."""

    def __init__(self, path: Path, header: RecordingHeader) -> None:
        """Create the file, which must not exist, readable by its owner only.

        Raises:
            OSError: it cannot be written.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file: BinaryIO = os.fdopen(descriptor, "wb")
        self._file.write(MAGIC)
        self._unflushed = 0
        self._stream = zstandard.ZstdCompressor(level=1).stream_writer(self._file, closefd=False)
        self.add(Entry(EntryKind.HEADER, "", header.model_dump_json().encode()))

    @property
    def num_bytes(self) -> int:
        """Size of the file so far, but for the last few entries."""
        return self._file.tell()

    def add(self, entry: Entry) -> None:
        """Append one entry."""
        name = entry.worker.encode()[:MAX_NAME_BYTES]
        self._stream.write(_FRAME.pack(entry.kind, 1 + len(name) + len(entry.payload)))
        self._stream.write(bytes([len(name)]) + name)
        self._stream.write(entry.payload)
        self._unflushed += len(entry.payload)
        if self._unflushed > _FLUSH_BYTES:
            self._unflushed = 0
            self._stream.flush()

    def flush(self) -> None:
        """Make everything so far readable."""
        self._stream.flush()
        self._file.flush()

    def close(self) -> None:
        """End the file in order."""
        try:
            self.add(Entry(EntryKind.END, "", b""))
            self._stream.flush(zstandard.FLUSH_FRAME)
        finally:
            self._file.close()


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
        DataFault: damaged.
    """
    first = next(read_entries(path))
    if first.kind is not EntryKind.HEADER:
        raise DataFault(f"{path.name} does not begin with a header", field=_FIELD)
    try:
        header = RecordingHeader.model_validate_json(first.payload)
    except ValidationError as error:
        raise DataFault(f"the header of {path.name} cannot be read", field=_FIELD) from error
    if header.version != VERSION:
        message = f"{path.name} is a recording of version {header.version}, this release reads {VERSION}"
        raise InvalidRequest(message, field=_FIELD)
    return header


def read_entries(path: Path) -> Iterator[Entry]:
    """The entries of the file at `path`, in order, until END.

    Raises:
        InvalidRequest: no recording, or the file cannot be opened.
        DataFault: damaged or cut off; says after how many entries.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise InvalidRequest(f"{path.name} is no recording of plans", field=_FIELD)
            yield from _entries(file, path.name)
    except OSError as error:
        raise InvalidRequest(f"{path.name} cannot be read: {error.strerror}", field=_FIELD) from error


def _entries(file: BinaryIO, name: str) -> Iterator[Entry]:
    source = _PlainBytes(file, name)
    while True:
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


class _PlainBytes:
    """What a compressed file holds, as far as it goes: a file that was cut off gives all that was flushed to it."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.num_entries = 0
        """Taken so far, for messages."""
        self._file = file
        self._name = name
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
        self._plain = bytearray()

    def take(self, size: int) -> bytes:
        """The next `size` bytes.

        Raises:
            DataFault: damaged, or there are not that many.
        """
        while len(self._plain) < size:
            part = self._file.read(_READ_BYTES)
            if not part:
                raise DataFault(f"{self._name} ends after {self.num_entries} entries, without its end", field=_FIELD)
            try:
                self._plain += self._decompressor.decompress(part)
            except zstandard.ZstdError as error:
                raise self.damage() from error
        taken = bytes(self._plain[:size])
        del self._plain[:size]
        return taken

    def damage(self) -> DataFault:
        """The error that says where."""
        return DataFault(f"{self._name} is damaged after {self.num_entries} entries", field=_FIELD)


_KINDS = frozenset(int(kind) for kind in EntryKind)
