"""Changes of inputs: of bytes, and of messages and JSON by what they mean. The same random numbers, the same change."""

import json
import random
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

MOST_BYTES = 64 << 10
"""Longer inputs are cut or left out: what they would find, short ones find sooner."""
INTEGERS = (0, 1, -1, 2, 15, 16, 17, 127, 128, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 100.0, 1e-45, 3e38, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "a", "\0", "é🙂" * 40, "x" * 5000, "%s%n", "../../etc/passwd", "{{ x }}", "(a+)+b")
_NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    """One change anywhere."""
    made = bytearray(data)
    place = rng.randrange(len(made) + 1)
    kind = rng.randrange(6)
    if kind == 0 and made:
        made[place % len(made)] ^= 1 << rng.randrange(8)
    elif kind == 1 and made:
        made[place % len(made)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif kind == 2:
        del made[place : place + rng.randint(1, 8)]
    elif kind == 3:
        made[place:place] = rng.randbytes(rng.randint(1, 8))
    elif kind == 4:
        size = rng.choice((1, 2, 4, 8))
        number = rng.choice(INTEGERS) % 256**size
        made[place : place + size] = number.to_bytes(size, rng.choice(("little", "big")))
    else:
        begin = rng.randrange(len(made) + 1)
        made[place:place] = made[begin : begin + rng.randint(1, 64)] * rng.randint(1, 8)
    return bytes(made[:MOST_BYTES])


def changed_message(data: bytes, message_class: type[Message], rng: random.Random) -> bytes:
    """One field of the message, at any depth, is another; bytes that are no message are changed as bytes."""
    message: Any = message_class()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return changed_bytes(data, rng)
    _change_field(_holder(message, rng), rng)
    try:
        made = bytes(message.SerializeToString(deterministic=True))
    except (ValueError, RecursionError):
        return data
    return made if len(made) <= MOST_BYTES else data


def _holder(message: Any, rng: random.Random) -> Any:
    """The message or one that is embedded in it; absent ones are put there now and then."""
    while rng.random() < 0.75:
        inner = []
        for field in message.DESCRIPTOR.fields:
            if field.message_type is None or field.message_type.GetOptions().map_entry:
                continue
            value = getattr(message, field.name)
            if field.is_repeated:
                inner.extend(list(value) or ([value.add()] if rng.random() < 0.1 else []))
            elif message.HasField(field.name) or rng.random() < 0.1:
                value.SetInParent()
                inner.append(value)
        if not inner:
            break
        message = rng.choice(inner)
    return message


def _change_field(message: Any, rng: random.Random) -> None:
    fields = list(message.DESCRIPTOR.fields)
    present = [field for field, _ in message.ListFields()]
    field = rng.choice(present if present and rng.random() < 0.7 else fields)
    if rng.random() < 0.1:
        message.ClearField(field.name)
    elif field.message_type is not None:
        _change_embedded(message, field, rng)
    elif field.is_repeated:
        values = getattr(message, field.name)
        if values and rng.random() < 0.5:
            values[rng.randrange(len(values))] = _value(field, values[0], rng)
        else:
            values.extend([_value(field, None, rng)] * rng.choice((1, 1, 2, 40, 300)))
    else:
        setattr(message, field.name, _value(field, getattr(message, field.name), rng))


def _change_embedded(message: Any, field: FieldDescriptor, rng: random.Random) -> None:
    value = getattr(message, field.name)
    if field.message_type.GetOptions().map_entry:
        key = rng.choice(INTEGERS) % 2**31
        with_value = field.message_type.fields_by_name["value"]
        if with_value.message_type is None:
            value[key] = _value(with_value, None, rng)
    elif not field.is_repeated:
        value.SetInParent()
    elif value and rng.random() < 0.3:
        del value[rng.randrange(len(value))]
    else:
        made = value.add()
        if len(value) > 1:
            made.CopyFrom(value[rng.randrange(len(value) - 1)])


def _value(field: FieldDescriptor, known: Any, rng: random.Random) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        is_bytes = field.type == FieldDescriptor.TYPE_BYTES
        return changed_column(known or b"", rng) if is_bytes else rng.choice(TEXTS)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice((*FLOATS, rng.uniform(-2, 2)))
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    low, high = _NUMBERS[field.cpp_type]
    near = (known or 0) + rng.choice((-1, 1))
    return min(max(rng.choice((*INTEGERS, near, near)), low), high)


def changed_column(column: bytes, rng: random.Random) -> bytes:
    """One number of a column of little-endian numbers is another, or the column has one more or less."""
    size = rng.choice((1, 4, 4, 4, 8))
    if rng.random() < 0.2 or len(column) < size:
        return column + rng.randbytes(size) if rng.random() < 0.5 else column[:-size]
    index = rng.randrange(len(column) // size) * size
    number = int.from_bytes(column[index : index + size], "little")
    if size == 4 and rng.random() < 0.2:
        made = np.float32(rng.choice(FLOATS)).tobytes()
    else:
        made = (rng.choice((*INTEGERS, number + 1, number - 1)) % 256**size).to_bytes(size, "little")
    return column[:index] + made + column[index + size :]


def changed_json(data: bytes, rng: random.Random) -> bytes:
    """One value of the JSON text is another, or a key; text that is no JSON is changed as bytes."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return changed_bytes(data, rng)
    holders = list(_holders(value))
    if not holders:
        return changed_bytes(data, rng)
    holder = rng.choice(holders)
    place = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    kind = rng.randrange(8)
    if kind == 0:
        del holder[place]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice((*TEXTS, place + "x"))] = holder[place]
    else:
        old = holder[place]
        near = (old + 1, old - 1, -old) if isinstance(old, int | float) and abs(old) < 2**70 else ()
        holder[place] = rng.choice((*INTEGERS, *FLOATS, *TEXTS, None, True, [], {}, [old], [old] * 40, *near))
    return json.dumps(value).encode()[:MOST_BYTES]


def _holders(value: Any) -> Any:
    if isinstance(value, dict | list) and value:
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _holders(inner)
