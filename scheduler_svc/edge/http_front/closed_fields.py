"""The base of everything that callers of the HTTP front may send, and how a body becomes it.

Knows no field. Guards: a field is used, or has its neutral value, or is refused by name; none is given twice; no
message holds what was sent in a field.
"""

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from protos.wire.errors import InvalidRequest
from scheduler_svc.edge.http_front.body_refusals import NOT_OFFERED, UNKNOWN, body_refusal, field_name

Neutral = Mapping[str, tuple[object, ...]]
"""Fields of OpenAI's API that this server does not offer, with the values, beside null, that ask for nothing."""


class ClosedFields(BaseModel):
    """Closed, frozen, no value is turned into another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    neutral: ClassVar[Neutral] = MappingProxyType({})

    @model_validator(mode="before")
    @classmethod
    def _close(cls, data: Any) -> Any:
        """Take neutral values away; refuse the first field that is left over."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {}
        for name, value in data.items():
            if name in known:
                kept[name] = value
            elif name not in cls.neutral:
                raise PydanticCustomError(UNKNOWN, "is not a field of this request", {"name": name})
            elif value is not None and not any(_is_same(value, neutral) for neutral in cls.neutral[name]):
                raise PydanticCustomError(NOT_OFFERED, "is not offered by this server", {"name": name})
        return kept


FieldsT = TypeVar("FieldsT", bound=ClosedFields)


def parse_fields(body: bytes, model: type[FieldsT]) -> FieldsT:
    """What `body` holds.

    Raises:
        InvalidRequest: not JSON, or a field that is unknown, given twice or of the wrong type.
        UnsupportedFeature: a field of OpenAI's API that this server does not offer.
    """
    try:
        data = from_json(body)
    except ValueError as error:
        message = f"the body is not JSON: {error}"
        raise InvalidRequest(message) from None
    _check_each_once(body)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise body_refusal(error.errors(include_url=False)[0]) from None


def _is_same(value: object, neutral: object) -> bool:
    return type(value) is type(neutral) and value == neutral


class _Pairs(list[tuple[str, Any]]):
    """The members of one object, as they were written."""


def _check_each_once(body: bytes) -> None:
    """Readers of JSON differ in which of two values they take; so nobody is to guess."""
    are_doubled = False

    def look(pairs: list[tuple[str, Any]]) -> None:
        nonlocal are_doubled
        are_doubled |= len({name for name, _ in pairs}) < len(pairs)

    json.loads(body, object_pairs_hook=look, parse_int=str, parse_float=str)
    if are_doubled:
        whole = json.loads(body, object_pairs_hook=_Pairs, parse_int=str, parse_float=str)
        field = field_name(next(_doubled(whole, ())))
        raise InvalidRequest(f"{field} is given twice", field=field)


def _doubled(value: Any, place: tuple[int | str, ...]) -> Iterator[tuple[int | str, ...]]:
    """The places of members whose object has them twice, in the order of the text."""
    if isinstance(value, _Pairs):
        seen: set[str] = set()
        for name, inner in value:
            if name in seen:
                yield (*place, name)
            seen.add(name)
            yield from _doubled(inner, (*place, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _doubled(inner, (*place, index))
