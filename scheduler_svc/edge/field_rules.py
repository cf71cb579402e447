"""What every field of a caller's request may hold: one table, one rule a field.

Knows fields one by one; what depends on several is in `validate_request`. Guards: a field without a rule cannot be
read by the walk, and a test compares the table with the schema.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from google.protobuf.message import Message

from protos.forwardplane.v1.generate_pb2 import HiddenStateSelection
from protos.wire import limits
from protos.wire.errors import InvalidRequest
from protos.wire.request_ranges import REQUEST_RANGES, show_number
from scheduler_svc.edge.model_facts import ModelFacts

Limit = float | Callable[[ModelFacts], float]


class Rule(Protocol):
    """What one field, or each item of one repeated field, may hold."""

    def check(self, value: Any, field: str, facts: ModelFacts, /) -> None:
        """Raise InvalidRequest, naming the field, the value and the limit."""
        ...


@dataclass(frozen=True, slots=True)
class Anything:
    """Every value of the type is good."""

    def check(self, _value: Any, _field: str, _facts: ModelFacts, /) -> None:
        """Nothing to refuse."""


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number of an interval."""

    low: float
    high: Limit

    def check(self, value: float, field: str, facts: ModelFacts, /) -> None:
        """Refuse what is outside."""
        high = _resolve(self.high, facts)
        # Written so that NaN, for which every comparison is false, is outside.
        if not self.low <= value <= high:
            message = f"{field} is {show_number(value)}; allowed: [{show_number(self.low)}, {show_number(high)}]"
            raise InvalidRequest(message, field=field)


@dataclass(frozen=True, slots=True)
class Text:
    """Text of a bounded number of UTF-8 bytes."""

    max_bytes: int
    min_bytes: int = 0

    def check(self, value: str, field: str, _facts: ModelFacts, /) -> None:
        """Refuse what is too short or too long."""
        size = len(value) if len(value) > self.max_bytes else len(value.encode())
        if size < self.min_bytes:
            raise InvalidRequest(f"{field} is empty", field=field)
        if size > self.max_bytes:
            raise InvalidRequest(f"{field} has {size} bytes or more; the limit is {self.max_bytes}", field=field)


@dataclass(frozen=True, slots=True)
class Sealed:
    """Bytes that only their maker reads: some, and not too many."""

    max_bytes: int

    def check(self, value: bytes, field: str, _facts: ModelFacts, /) -> None:
        """Refuse what is empty or too long."""
        if not 0 < len(value) <= self.max_bytes:
            raise InvalidRequest(f"{field} has {len(value)} bytes; allowed: [1, {self.max_bytes}]", field=field)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some words."""

    words: tuple[str, ...]

    def check(self, value: str, field: str, _facts: ModelFacts, /) -> None:
        """Refuse other words."""
        if value not in self.words:
            allowed = ", ".join(self.words)
            raise InvalidRequest(f"{field} is not one of: {allowed}", field=field)


@dataclass(frozen=True, slots=True)
class Items:
    """A repeated field: how many items, and what each of them may be. Messages have rules of their own."""

    max_items: Limit
    item: Rule | None = None
    min_items: int = 0

    def check(self, value: Sequence[Any], field: str, facts: ModelFacts, /) -> None:
        """Refuse a list that is too short or too long, or one of whose items is refused."""
        high = _resolve(self.max_items, facts)
        if len(value) < self.min_items:
            raise InvalidRequest(f"{field} is empty", field=field)
        if len(value) > high:
            raise InvalidRequest(f"{field} has {len(value)} items; the limit is {show_number(high)}", field=field)
        if self.item is not None:
            for index, item in enumerate(value):
                self.item.check(item, f"{field}[{index}]", facts)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A list of ids, each below the width of the logits."""

    max_items: Limit
    min_items: int = 0

    def check(self, value: Sequence[int], field: str, facts: ModelFacts, /) -> None:
        """Refuse a list that is too short or too long, or that holds an id the model does not have."""
        Items(self.max_items, min_items=self.min_items).check(value, field, facts)
        ids = np.array(value, np.int64)
        outside = np.flatnonzero((ids < 0) | (ids >= facts.logits_width))
        if len(outside):
            index = int(outside[0])
            place = f"{field}[{index}]"
            raise InvalidRequest(f"{place} is {ids[index]}; allowed: [0, {facts.logits_width - 1}]", field=place)


@dataclass(frozen=True, slots=True)
class Bias:
    """A map from ids the model has to numbers from -most to most."""

    max_items: int
    most: float

    def check(self, value: Mapping[int, float], field: str, facts: ModelFacts, /) -> None:
        """Refuse a map that is too large, or that holds an unknown id or a number outside."""
        if len(value) > self.max_items:
            raise InvalidRequest(f"{field} has {len(value)} items; the limit is {self.max_items}", field=field)
        values = Number(-self.most, self.most)
        for token_id, number in sorted(value.items()):
            place = f"{field}[{token_id}]"
            if not 0 <= token_id < facts.logits_width:
                raise InvalidRequest(f"{place} has no such id; allowed: [0, {facts.logits_width - 1}]", field=place)
            values.check(number, place, facts)


def _resolve(limit: Limit, facts: ModelFacts) -> float:
    return limit(facts) if callable(limit) else limit


def _context(facts: ModelFacts) -> float:
    return facts.context_tokens


def _last_position(facts: ModelFacts) -> float:
    return facts.context_tokens - 1


def _logits_width(facts: ModelFacts) -> float:
    return facts.logits_width


def _logprobs(facts: ModelFacts) -> float:
    return min(limits.MAX_LOGPROBS, facts.max_logprobs)


_PROMPT_TEXT = Text(limits.MAX_PROMPT_BYTES, min_bytes=1)
_GRAMMAR = Text(limits.MAX_GRAMMAR_BYTES, min_bytes=1)
_CHAT: Mapping[str, Rule] = MappingProxyType(
    {
        "chat.messages": Items(limits.MAX_CHAT_MESSAGES, min_items=1),
        "chat.messages.role": Choice(("system", "user", "assistant")),
        "chat.messages.content": Text(limits.MAX_PROMPT_BYTES),
    }
)


def _number(path: str, high: Limit | None = None) -> Number:
    """The rule of a number whose range is in the table; `high`: what the model makes of it."""
    allowed = REQUEST_RANGES[path]
    return Number(allowed.low, allowed.high if high is None else high)


SAMPLING_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "temperature": _number("sampling.temperature"),
        "top_p": _number("sampling.top_p"),
        "top_k": _number("sampling.top_k", _logits_width),
        "min_p": _number("sampling.min_p"),
        "repetition_penalty": _number("sampling.repetition_penalty"),
        "frequency_penalty": _number("sampling.frequency_penalty"),
        "presence_penalty": _number("sampling.presence_penalty"),
        "seed": Anything(),
        "n": _number("sampling.n"),
        "logit_bias": Bias(limits.MAX_LOGIT_BIAS_IDS, most=limits.MAX_LOGIT_BIAS),
        "allowed_token_ids": TokenIds(limits.MAX_LISTED_TOKEN_IDS),
        "banned_token_ids": TokenIds(limits.MAX_LISTED_TOKEN_IDS),
    }
)
GENERATE_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "text": _PROMPT_TEXT,
        **_CHAT,
        "tokens.ids": TokenIds(_context, min_items=1),
        **{f"sampling.{name}": rule for name, rule in SAMPLING_RULES.items()},
        # 0 goes with what is asked of the prompt only.
        "stop.max_tokens": _number("stop.max_tokens", _context),
        "stop.min_tokens": _number("stop.min_tokens", _context),
        "stop.stop_strings": Items(limits.MAX_STOP_STRINGS, Text(limits.MAX_STOP_STRING_BYTES, min_bytes=1)),
        "stop.stop_token_ids": TokenIds(limits.MAX_STOP_TOKEN_IDS),
        "stop.ignore_eos": Anything(),
        # Which model is served is checked with the other things that are not limits.
        "model": Text(limits.MAX_PROMPT_BYTES),
        "client_tag": Text(limits.MAX_CLIENT_TAG_BYTES),
        "logprobs": _number("logprobs", _logprobs),
        "prompt_logprobs.top": _number("prompt_logprobs.top", _logprobs),
        "prompt_logprobs.start": _number("prompt_logprobs.start", _last_position),
        "hidden_states": Number(0, max(HiddenStateSelection.values())),
        "keep_special_tokens": Anything(),
        "cache_salt": Text(limits.MAX_CACHE_SALT_BYTES),
        "priority": _number("priority"),
        "echo": Anything(),
        "json_schema": _GRAMMAR,
        "regex": _GRAMMAR,
        "ebnf": _GRAMMAR,
        "resume": Items(limits.MAX_SAMPLES),
        "resume.ticket": Sealed(limits.MAX_TICKET_BYTES),
        "resume.token_ids": TokenIds(_context),
        "resume.text_bytes": _number("resume.text_bytes"),
        "resume.has_begun": Anything(),
        "resume.prompt_logprobs": _number("resume.prompt_logprobs", _context),
        "resume.hidden_states": Anything(),
        "choice.texts": Items(limits.MAX_CHOICES, Text(limits.MAX_CHOICE_BYTES, min_bytes=1), min_items=1),
    }
)
TOKENIZE_RULES: Mapping[str, Rule] = MappingProxyType({"text": _PROMPT_TEXT, **_CHAT})
DETOKENIZE_RULES: Mapping[str, Rule] = MappingProxyType(
    {"token_ids": TokenIds(limits.MAX_PROMPT_TOKENS), "keep_special_tokens": Anything()}
)
ABORT_RULES: Mapping[str, Rule] = MappingProxyType({"request_id": Text(limits.MAX_REQUEST_ID_BYTES, min_bytes=1)})


def check_fields(message: Message, rules: Mapping[str, Rule], facts: ModelFacts) -> None:
    """Check every field that is set, nested ones too.

    Raises:
        InvalidRequest: a value is outside its limits.
    """
    _walk(message, rules, facts, path="", place="")


def _walk(message: Message, rules: Mapping[str, Rule], facts: ModelFacts, *, path: str, place: str) -> None:
    """`path` names a field in the rules, `place` the same with indices."""
    for field in message.DESCRIPTOR.fields:
        inner, where = path + field.name, place + field.name
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            rules[inner].check(value, where, facts)
        elif field.is_repeated:
            rules[inner].check(value, where, facts)
            for index, item in enumerate(value):
                _walk(item, rules, facts, path=inner + ".", place=f"{where}[{index}].")
        else:
            _walk(value, rules, facts, path=inner + ".", place=where + ".")
