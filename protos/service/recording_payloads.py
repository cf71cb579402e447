"""What the entries of a recording hold beside plans and results: a worker's attach answer, and what a file opens with.

Guards: a payload that cannot be read, or that contradicts itself, is a DataFault; nothing in it is trusted.
"""

import io
import struct
import zipfile
from dataclasses import dataclass, fields

import numpy as np

from protos.forwardplane.v1.worker_pb2 import AttachReply
from protos.wire.codec import worker_info_from_proto, worker_info_to_proto
from protos.wire.errors import DataFault
from protos.wire.worker_info import WorkerInfo

Array = np.ndarray

_PAIR = struct.Struct("<QQ")
_FIELD = "recording"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """Payload of ATTACH."""

    epoch: int
    term: int
    info: WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecentTokens:
    """What the last plans before a file sampled, for plans that refer to them. All [n], a row of a plan each."""

    seqs: Array
    """u64"""
    rows: Array
    """u32"""
    handles: Array
    """u64"""
    attempts: Array
    """u32"""
    positions: Array
    """i32: of the last input token."""
    token_ids: Array
    """i32"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LivePages:
    """Payload of PAGES: the tokens behind every page that a later plan may read, parents before children."""

    is_complete: bool
    """False: something was lost before this file; pages may be missing."""
    pages: Array
    """i32 [n]"""
    parents: Array
    """i32 [n]: a page that holds what comes before it; 0: none."""
    indptr: Array
    """i64 [n + 1]"""
    token_ids: Array
    """i32 [indptr[n]]"""
    recent: RecentTokens


_PAGE_ARRAYS = ("pages", "parents", "indptr", "token_ids")
_RECENT_ARRAYS = tuple(field.name for field in fields(RecentTokens))


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
    recent = {f"recent_{name}": getattr(live.recent, name) for name in _RECENT_ARRAYS}
    np.savez(buffer, is_complete=np.array(live.is_complete), **arrays, **recent)
    return buffer.getvalue()


def decode_pages(payload: bytes) -> LivePages:
    """The PAGES in `payload`.

    Raises:
        DataFault: malformed.
    """
    try:
        with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
            recent = RecentTokens(**{name: arrays[f"recent_{name}"] for name in _RECENT_ARRAYS})
            columns = {name: arrays[name] for name in _PAGE_ARRAYS}
            live = LivePages(is_complete=bool(arrays["is_complete"]), recent=recent, **columns)
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataFault("a pages entry cannot be read", field=_FIELD) from error
    _check(live)
    return live


def _check(live: LivePages) -> None:
    arrays = (*(getattr(live, name) for name in _PAGE_ARRAYS), *(getattr(live.recent, name) for name in _RECENT_ARRAYS))
    is_flat = all(array.ndim == 1 and array.dtype.kind in "iu" for array in arrays)
    if not is_flat or len(live.indptr) != len(live.pages) + 1 or len(live.parents) != len(live.pages):
        raise DataFault("a pages entry contradicts itself", field=_FIELD)
    sizes = {len(getattr(live.recent, name)) for name in _RECENT_ARRAYS}
    if live.indptr[-1] != len(live.token_ids) or len(sizes) > 1:
        raise DataFault("a pages entry contradicts itself", field=_FIELD)
