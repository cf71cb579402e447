"""Counts the fields of a message in its bytes, before they become objects.

Two bytes are an empty sub-message, whose object takes some 150: 4 MiB of them took 320 MB in C structures that are
not given back. So a long message is walked first, and one with too many fields is no message. A part that does not end
well is counted up to there, since the parser makes what is in front of it; its bytes are left to the parser. Knows
the schema only by its descriptors.
"""

import contextlib
from typing import Any, NamedTuple, TypeAlias

from protos.wire.limits import MAX_FIELDS_OF_ONE_MESSAGE, MAX_MESSAGE_FIELDS

SCANNED_BYTES = 64 << 10
"""Shorter messages cannot become large."""

_VARINT, _LONG, _BYTES, _INT = 0, 1, 2, 5
_FIXED_BYTES = {_LONG: 8, _INT: 4}
_MORE = 0x80
"""From here on, a byte of a number is not its last one."""
_MAX_VARINT_BYTES = 10

_Fields: TypeAlias = "dict[int, _Fields]"


class _Part(NamedTuple):
    """Where in the bytes a message lies, and which of its fields hold messages."""

    begin: int
    end: int
    fields: _Fields


def has_too_many_fields(message_class: Any, data: bytes) -> bool:
    """Whether `data` has more than MAX_MESSAGE_FIELDS fields, those of embedded messages included.

    So does one of whose messages alone has more than MAX_FIELDS_OF_ONE_MESSAGE: most floods end there.

    Descriptors are looked at only for a long message: this stands in front of every call.
    """
    return len(data) >= SCANNED_BYTES and _exceeds(data, _embedded(message_class.DESCRIPTOR, {}))


def _embedded(descriptor: Any, known: dict[str, _Fields]) -> _Fields:
    """Numbers of the fields that hold messages, with the same of those."""
    if descriptor.full_name in known:
        return known[descriptor.full_name]
    fields: _Fields = {}
    known[descriptor.full_name] = fields
    for field in descriptor.fields:
        if field.message_type is not None:
            fields[field.number] = _embedded(field.message_type, known)
    return fields


def _exceeds(data: bytes, fields: _Fields) -> bool:
    waiting = [_Part(0, len(data), fields)]
    left = MAX_MESSAGE_FIELDS
    while waiting and left >= 0:
        seen = _walked(data, waiting.pop(), waiting, most=min(left, MAX_FIELDS_OF_ONE_MESSAGE))
        left = -1 if seen > MAX_FIELDS_OF_ONE_MESSAGE else left - seen
    return left < 0


def _walked(data: bytes, part: _Part, waiting: list[_Part], *, most: int) -> int:
    """How many fields the part has itself, or one more than `most`; embedded messages join those that wait.

    The numbers of small fields are one byte long: those are read here, without a call.
    """
    place, end, fields = part
    seen = 0
    with contextlib.suppress(IndexError):
        while place < end and seen <= most:
            seen += 1
            tag = data[place]
            place += 1
            if tag >= _MORE:
                tag, place = _varint(data, place - 1)
            if tag & 7 != _BYTES:
                place = _skipped(data, place, tag & 7)
                continue
            size = data[place]
            place += 1
            if size >= _MORE:
                size, place = _varint(data, place - 1)
            inner = fields.get(tag >> 3)
            if size and inner is not None:
                waiting.append(_Part(place, min(place + size, end), inner))
            place += size
    return seen


def _skipped(data: bytes, place: int, kind: int) -> int:
    """Behind a value of a fixed kind. Groups are walked as if their fields were those of the message around them."""
    if kind == _VARINT:
        return place + 1 if data[place] < _MORE else _varint(data, place)[1]
    return place + _FIXED_BYTES.get(kind, 0)


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """The number, and the place behind it.

    Raises:
        IndexError: it does not end.
    """
    value = data[place]
    if value < 0x80:
        return value, place + 1
    value &= 0x7F
    for index in range(1, _MAX_VARINT_BYTES):
        byte = data[place + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, place + index + 1
    raise IndexError
