"""What a grammar process and its owner tell each other, as bytes. Pure.

A call is a list of questions; its reply has one answer a question, in order.
"""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from scheduler_svc.text.grammar_source import GrammarKind, GrammarSource

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """The first message to a new process: for which model, and within which limits."""

    tokenizer: str
    """Path of the tokenizer's file."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    memory_bytes: int
    """Beyond what the tokenizer takes."""
    cpu_s: int
    """For one question."""
    cache_bytes: int
    """Of compiled grammars that no row uses now."""
    niceness: int = 0
    """How much others go before it on the processor, as `nice` counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The mask after `ids`, of which the process knows the first `base` when it knows the row."""

    row: tuple[int, int]
    source: GrammarSource | None
    """None when `base` is above 0: the row has its grammar."""
    base: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """Bits or a refusal, or neither: the process does not know the row; ask from the beginning."""

    bits: bytes | None = None
    """Bit i of byte i / 8, least significant first: id i may follow; an end-of-sequence id if the output matches."""
    refusal: str | None = None
    """Why there is no mask: the caller's fault."""
    compile_s: float | None = None
    """How long its grammar was compiled for this reply; None: that was not needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Rows that ended, then questions."""

    ended_rows: tuple[tuple[int, int], ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """One reply a question."""

    replies: tuple[Reply, ...]
    is_full: bool
    """The process has little memory left and should be started anew."""


def allows_any(bits: bytes, ids: Iterable[int]) -> bool:
    """Whether a mask has one of the ids."""
    return any(bits[token_id // 8] >> token_id % 8 & 1 for token_id in ids if token_id < 8 * len(bits))


def encode_greeting(greeting: Greeting) -> bytes:
    """Its bytes."""
    return json.dumps({name: getattr(greeting, name) for name in Greeting.__slots__}).encode()


def decode_greeting(body: bytes) -> Greeting:
    """From its bytes."""
    values = json.loads(body)
    return Greeting(**{**values, "eos_token_ids": tuple(values["eos_token_ids"])})


def encode_call(call: Call) -> bytes:
    """Its bytes."""
    questions = [[*question.row, question.base, question.ids, *(question.source or ())] for question in call.questions]
    return json.dumps([call.ended_rows, questions]).encode()


def decode_call(body: bytes) -> Call:
    """From its bytes."""
    ended_rows, questions = json.loads(body)
    return Call(
        ended_rows=tuple((edge, stream) for edge, stream in ended_rows), questions=tuple(map(_question, questions))
    )


def encode_replies(replies: Replies) -> bytes:
    """A header, then the masks one after the other."""
    heads = [
        [None if reply.bits is None else len(reply.bits), reply.refusal, reply.compile_s] for reply in replies.replies
    ]
    header = json.dumps([replies.is_full, heads]).encode()
    masks = [reply.bits for reply in replies.replies if reply.bits is not None]
    return b"".join([_LENGTH.pack(len(header)), header, *masks])


def decode_replies(body: bytes) -> Replies:
    """From its bytes."""
    (length,) = _LENGTH.unpack_from(body)
    begin = _LENGTH.size + length
    is_full, heads = json.loads(body[_LENGTH.size : begin])
    replies = []
    for size, refusal, compile_s in heads:
        end = begin + (size or 0)
        bits = None if size is None else body[begin:end]
        replies.append(Reply(bits=bits, refusal=refusal, compile_s=compile_s))
        begin = end
    return Replies(replies=tuple(replies), is_full=is_full)


def _question(fields: list[Any]) -> Question:
    edge, stream, base, ids, *source = fields
    kind_and_text = GrammarSource(GrammarKind(source[0]), source[1]) if source else None
    return Question(row=(edge, stream), source=kind_and_text, base=base, ids=tuple(ids))
