"""What an output is to look like, in the words of OpenAI's `response_format` and of vLLM's `structured_outputs`.

Pure. Whether a grammar can be used is found out where the gRPC door does it.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from protos.forwardplane.v1.generate_pb2 import ChoiceList, GenerateRequest
from protos.wire.errors import InvalidRequest
from protos.wire.limits import MAX_CHOICES
from scheduler_svc.edge.http_front.body_refusals import HIDDEN_TAG, WRONG_KIND
from scheduler_svc.edge.http_front.closed_fields import ClosedFields, Neutral

GRAMMAR_FIELDS = ("json_schema", "regex", "ebnf", "choice.texts", "choice", "grammar")
"""As errors name them, the core's as well; a name comes before the beginning of it."""
_ANY_OBJECT = '{"type":"object"}'
_SCHEMA_FIELD = "response_format.json_schema.schema"


class NamedSchema(ClosedFields):
    """A JSON schema. It always holds strictly; its name is for the caller alone."""

    neutral: ClassVar[Neutral] = MappingProxyType({"description": ()})

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class AnyText(ClosedFields):
    """Nothing is asked of the output."""

    type: Literal["text"]


class AnyObject(ClosedFields):
    """Some JSON object."""

    type: Literal["json_object"]


class BySchema(ClosedFields):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


_TEXT, _OBJECT, _SCHEMA = (f"{HIDDEN_TAG}{kind}" for kind in ("text", "json_object", "json_schema"))


def _kind_of_format(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    return f"{HIDDEN_TAG}{kind}" if isinstance(kind, str) else None


ResponseFormat = Annotated[
    Annotated[AnyText, Tag(_TEXT)] | Annotated[AnyObject, Tag(_OBJECT)] | Annotated[BySchema, Tag(_SCHEMA)],
    Discriminator(
        _kind_of_format,
        custom_error_type=WRONG_KIND,
        custom_error_message="has to be an object whose type is text, json_object or json_schema",
    ),
]


def _kind_of_schema(value: Any) -> str | None:
    if isinstance(value, str):
        return _AS_TEXT
    return _AS_JSON if isinstance(value, dict) else None


_AS_JSON, _AS_TEXT = f"{HIDDEN_TAG}json", f"{HIDDEN_TAG}text"
JsonOrText = Annotated[
    Annotated[dict[str, Any], Tag(_AS_JSON)] | Annotated[str, Tag(_AS_TEXT)],
    Discriminator(
        _kind_of_schema, custom_error_type=WRONG_KIND, custom_error_message="has to be a schema, or its text"
    ),
]


class StructuredOutputs(ClosedFields):
    """One of four ways to say what the whole output has to match."""

    json_: Annotated[JsonOrText | None, Field(alias="json")] = None
    """A schema, or its text."""
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None
    """In Lark syntax, whose first rule is `start`."""


def shape_field(response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None) -> str:
    """The field that says what an output has to match; empty when none does."""
    if structured_outputs is not None:
        return ".".join(("structured_outputs", *list(_given(structured_outputs))[:1]))
    if isinstance(response_format, BySchema):
        return _SCHEMA_FIELD
    return "response_format" if isinstance(response_format, AnyObject) else ""


def shape_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> GenerateRequest | None:
    """A request's grammar, alone; None: nothing is asked of the output.

    Raises:
        InvalidRequest: two things at once, or none where one is needed.
    """
    if structured_outputs is None:
        return _of_format(response_format)
    if shape_field(response_format, None):
        message = "structured_outputs cannot be combined with response_format: each says what the output has to match"
        raise InvalidRequest(message, field="structured_outputs")
    return _of_structured(structured_outputs)


def _of_format(asked: ResponseFormat | None) -> GenerateRequest | None:
    if isinstance(asked, BySchema):
        return GenerateRequest(json_schema=_schema_text(asked.json_schema.schema_, _SCHEMA_FIELD))
    return GenerateRequest(json_schema=_ANY_OBJECT) if isinstance(asked, AnyObject) else None


def _given(asked: StructuredOutputs) -> dict[str, Any]:
    values = {"json": asked.json_, "regex": asked.regex, "choice": asked.choice, "grammar": asked.grammar}
    return {name: value for name, value in values.items() if value is not None}


def _of_structured(asked: StructuredOutputs) -> GenerateRequest:
    given = _given(asked)
    if len(given) != 1:
        named = ", ".join(given) or "none"
        message = f"structured_outputs needs one of json, regex, choice and grammar; it has {named}"
        raise InvalidRequest(message, field="structured_outputs")
    if asked.json_ is not None:
        text = asked.json_ if isinstance(asked.json_, str) else _schema_text(asked.json_, "structured_outputs.json")
        return GenerateRequest(json_schema=text)
    if asked.choice is not None:
        return GenerateRequest(choice=ChoiceList(texts=asked.choice))
    if asked.regex is not None:
        return GenerateRequest(regex=asked.regex)
    return GenerateRequest(ebnf=asked.grammar or "")


def _schema_text(schema: dict[str, Any], field: str) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise InvalidRequest(f"{field} holds a number that is not finite", field=field) from None
