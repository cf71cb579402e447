"""The base of everything that callers of the HTTP front may send, and how a body becomes it.

Knows no field. Guards: a field is used, or has its neutral value, or is refused by name; none is given twice; no
message holds what was sent in a field.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from protos.wire.errors import InvalidRequest
from scheduler_svc.edge.http_front.body_refusals import MAX_SHOWN_CHARS, NOT_OFFERED, UNKNOWN, body_refusal

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
    json.loads(body, object_pairs_hook=_each_once, parse_int=str, parse_float=str)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise body_refusal(error.errors(include_url=False)[0]) from None


def _is_same(value: object, neutral: object) -> bool:
    return type(value) is type(neutral) and value == neutral


def _each_once(pairs: list[tuple[str, Any]]) -> None:
    """Readers of JSON differ in which of two values they take; so nobody is to guess."""
    names = {name for name, _ in pairs}
    if len(names) == len(pairs):
        return
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            field = name[:MAX_SHOWN_CHARS]
            raise InvalidRequest(f"{field} is given twice", field=field)
        seen.add(name)
