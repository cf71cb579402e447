"""Every field of every request of the callers' service, found in the schema: its place, its borders, how to set it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from protos.forwardplane.v1 import generate_pb2 as pb

WIDTH = 300
CONTEXT = 100
NAN, INF = float("nan"), float("inf")
FLOATS = (0.0, -0.0, -1.0, NAN, INF, -INF, 1e-30, 3e38, -3e38)
INTEGERS = (
    *(0, -1, 1, WIDTH - 1, WIDTH, CONTEXT, CONTEXT + 1),
    *(2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1),
)
BORDERS: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.TYPE_FLOAT: FLOATS,
    FieldDescriptor.TYPE_BOOL: (False, True),
    FieldDescriptor.TYPE_STRING: ("", "a", "\0", "é" * 5000),
    FieldDescriptor.TYPE_BYTES: (b"", b"a", b"\0", b"\xff" * 5000),
    **dict.fromkeys(
        (
            *(FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_ENUM),
            *(FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_INT64),
        ),
        INTEGERS,
    ),
}
"""By the type of a field: a field of a type that is not here fails its test."""

CAPS = {
    "chat.messages": 256,
    "tokens.ids": CONTEXT,
    "sampling.logit_bias": 300,
    "sampling.allowed_token_ids": 4096,
    "sampling.banned_token_ids": 4096,
    "stop.stop_strings": 32,
    "stop.stop_token_ids": 64,
    "choice.texts": 1024,
    "resume": 16,
    "resume.token_ids": CONTEXT,
    "requests": 64,
    "token_ids": 1 << 20,
}
"""Most items of each list."""
IDS = (
    *("tokens.ids", "sampling.allowed_token_ids", "sampling.banned_token_ids", "stop.stop_token_ids"),
    *("resume.token_ids", "token_ids"),
)
INTERVALS = {
    "sampling.temperature": (0, 100),
    "sampling.top_p": (1e-30, 1),
    "sampling.top_k": (0, WIDTH),
    "sampling.min_p": (0, 1),
    "sampling.repetition_penalty": (1e-30, 10),
    "sampling.frequency_penalty": (-2, 2),
    "sampling.presence_penalty": (-2, 2),
    "sampling.seed": (0, 2**64 - 1),
    "sampling.n": (1, 16),
    "stop.max_tokens": (1, CONTEXT),
    "stop.min_tokens": (0, CONTEXT),
    "logprobs": (0, 20),
    "prompt_logprobs.top": (0, 20),
    "prompt_logprobs.start": (0, CONTEXT - 1),
    "hidden_states": (0, 2),
    "priority": (-10, 10),
    # What of it was given is known behind the tickets.
    "resume.text_bytes": (0, 2**32 - 1),
    "resume.prompt_logprobs": (0, CONTEXT),
}
"""Of each number that is not an id."""
BYTES = {
    "text": (1, 2 << 20),
    "chat.messages.content": (0, 2 << 20),
    "client_tag": (0, 128),
    "cache_salt": (0, 256),
    "json_schema": (1, 256 << 10),
    "regex": (1, 256 << 10),
    "ebnf": (1, 256 << 10),
    "stop.stop_strings": (1, 256),
    "choice.texts": (1, 4096),
    "resume.ticket": (1, 256),
    "request_id": (1, 128),
}
"""Least and most bytes of each text that is free, of lists: of each item."""
WORDS = {
    "chat.messages.role": ("system", "user", "assistant"),
    "model": ("tiny",),
    "pooling": ("", "last", "mean"),
}
"""What else a text may be."""

GOOD_ITEMS: dict[str, Message] = {
    "chat.messages": pb.ChatMessage(role="user", content="a"),
    "resume": pb.ResumedSample(ticket=b"t"),
    "requests": pb.GenerateRequest(text="a"),
}
"""A good item of each list of messages."""


@dataclass(frozen=True)
class Field:
    """One field of a request, however deep."""

    path: str
    """As tables name it."""
    place: str
    """As errors name it, where lists have one item."""
    description: FieldDescriptor

    @property
    def is_list(self) -> bool:
        """A map as well."""
        return self.description.is_repeated

    def of_call(self) -> str:
        """The path without the list of requests of a call that has several."""
        return self.path.removeprefix("requests.")


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def fields_of(message: Descriptor, path: str = "", place: str = "") -> Iterator[Field]:
    """Scalars, lists and maps; those of messages that are in lists too."""
    for field in message.fields:
        name, here = path + field.name, place + field.name
        if field.message_type is None or field.is_repeated:
            yield Field(name, here, field)
        if field.message_type is not None and not is_map(field):
            inside = f"{here}[0]." if field.is_repeated else f"{here}."
            yield from fields_of(field.message_type, name + ".", inside)


def with_place(request: Message, field: Field) -> tuple[Any, str]:
    """The message in `request` that holds the field, and the field's own name. Lists on the way get one good item."""
    *outer, name = field.path.split(".")
    holder: Any = request
    way = ""
    for part in outer:
        way = f"{way}.{part}" if way else part
        inner = getattr(holder, part)
        if way.removeprefix("requests.") in GOOD_ITEMS:
            if not inner:
                inner.add().CopyFrom(GOOD_ITEMS[way.removeprefix("requests.")])
            holder = inner[0]
        else:
            inner.SetInParent()
            holder = inner
    return holder, name


def fill(holder: Any, name: str, field: Field, count: int) -> None:
    """Put so many good items into the list."""
    items, path = getattr(holder, name), field.of_call()
    if is_map(field.description):
        items.update(dict.fromkeys(range(count), 0.0))
    elif path in GOOD_ITEMS:
        items.extend([GOOD_ITEMS[path]] * count)
    else:
        items.extend([1 if path in IDS else "a"] * count)
