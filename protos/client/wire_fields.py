"""Values of a caller into messages, field by field, so that whatever the wire cannot carry is refused by its name.

One walk over the schema for every request. Guards: no message holds a text that was to be sent.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from protos.wire.errors import InvalidRequest, MessageTooLarge
from protos.wire.limits import MAX_CALLER_MESSAGE_BYTES
from protos.wire.request_ranges import REQUEST_RANGES, Range, show_number

MessageT = TypeVar("MessageT", bound=Message)
Field: TypeAlias = Any
"""A FieldDescriptor; protobuf has two classes of them."""

_WHOLE = {
    FieldDescriptor.CPPTYPE_INT32: Range(-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: Range(-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: Range(0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: Range(0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_ENUM: Range(-(1 << 31), (1 << 31) - 1),
}
_KINDS = {
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_STRING: "a text",
    FieldDescriptor.CPPTYPE_MESSAGE: "a group of fields",
    **dict.fromkeys(_WHOLE, "a whole number"),
}
_INDEX = re.compile(r"\[[^]]*\]")
"""Of an item in a field's place; the table of ranges has none."""
_REFUSALS = (TypeError, ValueError, OverflowError)
"""What protobuf raises; none of them names the field."""


def filled(message: MessageT, values: Mapping[str, Any]) -> MessageT:
    """`message` with those fields set; a value of None leaves its field absent, a mapping fills a message.

    Raises:
        InvalidRequest: a value is of another type, or beyond what its field can carry; names field, value and range.
        MessageTooLarge: the message is larger than any server takes; names its largest field.
    """
    _fill(message, values, place="")
    size = message.ByteSize()
    if size > MAX_CALLER_MESSAGE_BYTES:
        field = largest_field(message)
        text = f"the request has {size} bytes, most of them in {field}; the limit is {MAX_CALLER_MESSAGE_BYTES}"
        raise MessageTooLarge(text, field=field)
    return message


def largest_field(message: Message) -> str:
    """Path of the field, or of the item of a list, that takes the most room; empty for an empty message."""
    name, value = max(_parts(message), key=lambda part: _size(part[1]), default=("", None))
    inner = largest_field(value) if isinstance(value, Message) else ""
    return f"{name}.{inner}" if inner else name


def _fill(message: Message, values: Mapping[str, Any], *, place: str) -> None:
    """`place` is what the fields' names begin with, and says with indices which item of a list they are of."""
    for name, value in values.items():
        field = message.DESCRIPTOR.fields_by_name[name]
        if value is None:
            continue
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            _set(message, field, value, place=place + name)
        elif field.is_repeated:
            for index, item in enumerate(value):
                _fill(getattr(message, name).add(), item, place=f"{place}{name}[{index}].")
        else:
            inner = getattr(message, name)
            inner.SetInParent()
            _fill(inner, value, place=f"{place}{name}.")


def _set(message: Message, field: Field, value: Any, *, place: str) -> None:
    try:
        if not field.is_repeated:
            setattr(message, field.name, value)
        elif field.message_type is not None:
            getattr(message, field.name).update(value)
        elif isinstance(value, str | bytes):
            raise TypeError
        else:
            getattr(message, field.name).extend(value)
    except _REFUSALS:
        raise _refusal(message, field, value, place=place) from None


def _refusal(message: Message, field: Field, value: Any, *, place: str) -> InvalidRequest:
    if not field.is_repeated:
        return _bad_value(field, value, place=place)
    if field.message_type is not None:
        return _bad_entry(field, value, place=place)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return InvalidRequest(f"{place} is {_shown(value)}; a list is needed", field=place)
    for index, item in enumerate(value):
        try:
            getattr(message, field.name).append(item)
        except _REFUSALS:
            return _bad_value(field, item, place=f"{place}[{index}]")
    return InvalidRequest(f"{place} cannot be sent", field=place)


def _bad_entry(field: Field, value: Any, *, place: str) -> InvalidRequest:
    """The first entry of a map that its message cannot carry."""
    if not isinstance(value, Mapping):
        return InvalidRequest(f"{place} is {_shown(value)}; a mapping is needed", field=place)
    key_field, value_field = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for key, item in value.items():
        where = f"{place}[{show_number(key)}]" if isinstance(key, int) else place
        limits = _WHOLE[key_field.cpp_type]
        if not isinstance(key, int) or not limits.low <= key <= limits.high:
            return InvalidRequest(f"{where} has no such id; ids are 0 and more", field=where)
        if not _is_real(item):
            return _bad_value(value_field, item, place=where)
    return InvalidRequest(f"{place} cannot be sent", field=place)


def _is_real(value: Any) -> bool:
    try:
        float(value)
    except _REFUSALS:
        return False
    return not isinstance(value, str)


def _bad_value(field: Field, value: Any, *, place: str) -> InvalidRequest:
    kind = _KINDS[field.cpp_type]
    if isinstance(value, str) and kind == "a text":
        return InvalidRequest(f"{place} is not valid Unicode", field=place)
    if isinstance(value, int) and not isinstance(value, bool) and kind in ("a number", "a whole number"):
        path = _INDEX.sub("", place).removeprefix("requests.")
        allowed = REQUEST_RANGES.get(path) or _WHOLE[field.cpp_type]
        return InvalidRequest(f"{place} is {show_number(value)}; allowed: {allowed.shown()}", field=place)
    return InvalidRequest(f"{place} is {_shown(value)}; {kind} is needed", field=place)


def _shown(value: Any) -> str:
    return show_number(value) if isinstance(value, float) else f"of the type {type(value).__name__}"


def _parts(message: Message) -> Iterator[tuple[str, Any]]:
    listed: list[tuple[Field, Any]] = list(message.ListFields())
    for field, value in listed:
        is_list = field.is_repeated and field.message_type is not None
        if is_list and not field.message_type.GetOptions().map_entry:
            yield from ((f"{field.name}[{index}]", item) for index, item in enumerate(value))
        else:
            yield field.name, value


def _size(value: Any) -> int:
    """Bytes, roughly: which of several is the largest."""
    if isinstance(value, Message):
        return value.ByteSize()
    if isinstance(value, str):
        return len(value.encode())
    return len(value) if isinstance(value, bytes) or hasattr(value, "__len__") else 1
