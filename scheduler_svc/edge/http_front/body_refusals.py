"""What is wrong with a body, in our words: from the validator's finding to the error that names the field.

Knows the kinds of findings and no field. Guards: no wording of the validator's reaches a caller, and of what was sent
only numbers do.
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from pydantic_core import ErrorDetails

from protos.wire.errors import EngineError, InvalidRequest, UnsupportedFeature
from protos.wire.request_ranges import REQUEST_RANGES, Range, show_number

HIDDEN_TAG = "?"
"""Begins the names of a union's members, which are no part of a field's place."""
NOT_OFFERED, UNKNOWN, WRONG_KIND = "not_offered", "unknown_field", "wrong_kind"
"""Findings of our own: a field that this server does not offer, or does not know; a value whose message is ours."""
MAX_SHOWN_CHARS = 64

_KEY = re.compile(r"-?\d{1,20}")
"""A key of a map from token ids."""
_RANGES: Mapping[str, Range] = MappingProxyType(
    {
        **{path.rpartition(".")[2]: found for path, found in REQUEST_RANGES.items()},
        "seed": Range(-(1 << 63), (1 << 64) - 1),
        "top_logprobs": REQUEST_RANGES["logprobs"],
        "best_of": REQUEST_RANGES["sampling.n"],
        "max_completion_tokens": REQUEST_RANGES["stop.max_tokens"],
        "prompt": REQUEST_RANGES["tokens.ids"],
        "input": REQUEST_RANGES["tokens.ids"],
    }
)
"""By the name that callers of this front use."""


def body_refusal(finding: ErrorDetails) -> EngineError:
    """The error for the first thing that the validator found."""
    place = (*finding["loc"], *_named(finding))
    field = field_name(place)
    if finding["type"] == NOT_OFFERED:
        return UnsupportedFeature(f"{field} is not offered by this server", field=field)
    return InvalidRequest(f"{field or 'the body'} {_says(finding, place)}", field=field)


def field_name(place: tuple[int | str, ...]) -> str:
    """As callers write it: `messages[0].content`."""
    name = ""
    for step in place:
        if isinstance(step, int) or (name and _KEY.fullmatch(step)):
            name += f"[{step}]"
        elif not step.startswith(HIDDEN_TAG):
            name += f".{step[:MAX_SHOWN_CHARS]}" if name else step[:MAX_SHOWN_CHARS]
    return name


def _named(finding: ErrorDetails) -> list[str]:
    """The field that our own findings name; the validator's have it in their place."""
    if finding["type"] not in (NOT_OFFERED, UNKNOWN):
        return []
    return [str(finding["ctx"]["name"])[:MAX_SHOWN_CHARS]]


def _says(finding: ErrorDetails, place: tuple[int | str, ...]) -> str:
    kind, context = finding["type"], finding.get("ctx", {})
    if kind in _OUTSIDE:
        return _outside(finding["input"], place)
    if kind == WRONG_KIND:
        return finding["msg"]
    return _WORDS.get(kind, _unexpected)(context)


def _outside(value: Any, place: tuple[int | str, ...]) -> str:
    """Of a whole number that its field cannot hold."""
    names = [step for step in place if isinstance(step, str) and not step.startswith(HIDDEN_TAG)]
    allowed = _RANGES.get(names[-1]) if names else None
    ends = f"; allowed: {allowed.shown()}" if allowed is not None else ", which is out of range"
    return f"is {show_number(value)}{ends}"


def _unexpected(_context: Mapping[str, Any]) -> str:
    return "has a value that is not allowed"


def _items(context: Mapping[str, Any]) -> str:
    count = context.get("actual_length")
    has = f"has {count} items" if count is not None else "has more items"
    return f"{has}; the limit is {context['max_length']}"


def _one_of(context: Mapping[str, Any]) -> str:
    words = str(context["expected"]).replace(" or ", ", ").replace("'", "")
    return f"is not one of: {words}"


def _is(words: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda _context: words


_OUTSIDE = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal"})
_WORDS: Mapping[str, Callable[[Mapping[str, Any]], str]] = MappingProxyType(
    {
        UNKNOWN: _is("is not a field of this request"),
        "missing": _is("is missing"),
        "model_type": _is("has to be an object"),
        "dict_type": _is("has to be an object"),
        "list_type": _is("has to be a list"),
        "string_type": _is("has to be a text"),
        "bool_type": _is("has to be true or false"),
        "int_type": _is("has to be a whole number"),
        "int_from_float": _is("has to be a whole number"),
        "float_type": _is("has to be a number"),
        "too_short": _is("is empty"),
        "too_long": _items,
        "literal_error": _one_of,
        "string_pattern_mismatch": lambda context: f"has to match {context['pattern']}",
    }
)
