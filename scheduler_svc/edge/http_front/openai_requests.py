"""What callers of the HTTP front may send, as closed frozen models: types here, limits in `field_rules`.

Knows nothing of HTTP. Guards: a field is used, or has its neutral value, or is refused by name; no message holds what
was sent in a field.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from protos.wire.errors import EngineError, InvalidRequest, UnsupportedFeature
from protos.wire.limits import MAX_CHAT_MESSAGES, MAX_PROMPT_TOKENS, MAX_PROMPTS_PER_CALL, MAX_STOP_TOKEN_IDS

_MAX_SHOWN_CHARS = 64
_NOT_OFFERED, _UNKNOWN = "not_offered", "unknown_field"
_TEXT, _IDS = "prompt of text", "prompt of ids"

Neutral = Mapping[str, tuple[object, ...]]
"""Fields of OpenAI's API that this server does not offer, with the values, beside null, that ask for nothing."""

_CHAT_NEUTRAL: Neutral = MappingProxyType(
    {
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "logit_bias": ({},),
        "metadata": ({},),
        "modalities": (["text"],),
        "moderation": (),
        "n": (1,),
        "parallel_tool_calls": (),
        "prediction": (),
        "prompt_cache_key": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "safety_identifier": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none",),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }
)
_COMPLETION_NEUTRAL: Neutral = MappingProxyType({"best_of": (1,), "logit_bias": ({},), "n": (1,), "suffix": ("",)})
_MESSAGE_NEUTRAL: Neutral = MappingProxyType(
    {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "name": (),
        "refusal": (),
        "tool_calls": ([],),
    }
)


class _Fields(BaseModel):
    """Base of all: closed, frozen, no value is turned into another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    neutral: ClassVar[Neutral] = MappingProxyType({})

    @model_validator(mode="before")
    @classmethod
    def _close(cls, data: Any) -> Any:
        """Take neutral values away; refuse the first field that is left over."""
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name not in cls.neutral:
                raise PydanticCustomError(_UNKNOWN, "is not a field of this request", {"name": name})
            elif value is not None and not any(_is_same(value, neutral) for neutral in cls.neutral[name]):
                raise PydanticCustomError(_NOT_OFFERED, "is not offered by this server", {"name": name})
        return kept


def _is_same(value: object, neutral: object) -> bool:
    return type(value) is type(neutral) and value == neutral


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> Any:
    is_ids = isinstance(value, list) and bool(value) and isinstance(value[0], int)
    return [value] if is_ids or isinstance(value, str) else value


def _kind_of_prompt(value: Any) -> str:
    return _IDS if isinstance(value, list) else _TEXT


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Int32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
Ids = Annotated[list[Int64], Field(fail_fast=True, max_length=MAX_PROMPT_TOKENS)]
Prompt = Annotated[Annotated[str, Tag(_TEXT)] | Annotated[Ids, Tag(_IDS)], Discriminator(_kind_of_prompt)]


class StreamOptions(_Fields):
    """What a stream carries beside text."""

    neutral: ClassVar[Neutral] = MappingProxyType({"include_obfuscation": (False,)})

    include_usage: bool | None = None


class CallFields(_Fields):
    """Whom a request is for, and how the answer comes."""

    model: str | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: Int32 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class SamplingFields(_Fields):
    """How tokens are drawn. Absent: as in the gRPC door."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: Seed | None = None


class StopFields(_Fields):
    """When the output ends, and what of it is text."""

    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    stop: Annotated[list[str], Field(fail_fast=True), BeforeValidator(_one_or_more)] | None = None
    stop_token_ids: Annotated[list[Int64], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None


class TextPart(_Fields):
    """A part of a message's content; only text is offered."""

    type: Literal["text"]
    text: str


class Message(_Fields):
    """One turn of a chat."""

    neutral: ClassVar[Neutral] = _MESSAGE_NEUTRAL

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], Field(fail_fast=True), BeforeValidator(_parts)]


class ChatRequest(CallFields, SamplingFields, StopFields):
    """Body of /v1/chat/completions."""

    neutral: ClassVar[Neutral] = _CHAT_NEUTRAL

    messages: Annotated[list[Message], Field(fail_fast=True, max_length=MAX_CHAT_MESSAGES)]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None


class CompletionRequest(CallFields, SamplingFields, StopFields):
    """Body of /v1/completions."""

    neutral: ClassVar[Neutral] = _COMPLETION_NEUTRAL

    prompt: Annotated[
        list[Prompt], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS_PER_CALL), BeforeValidator(_prompts)
    ]
    logprobs: Count | None = None
    echo: bool | None = None


class EmbeddingRequest(_Fields):
    """Body of /v1/embeddings."""

    neutral: ClassVar[Neutral] = MappingProxyType({"dimensions": ()})

    model: str | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: Int32 | None = None
    input: Annotated[
        list[Prompt], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS_PER_CALL), BeforeValidator(_prompts)
    ]
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None


RequestT = TypeVar("RequestT", ChatRequest, CompletionRequest, EmbeddingRequest)


def parse_request(body: bytes, model: type[RequestT]) -> RequestT:
    """The request that `body` holds.

    Raises:
        InvalidRequest: not JSON, or a field that is unknown or of the wrong type.
        UnsupportedFeature: a field of OpenAI's API that this server does not offer.
    """
    try:
        data = from_json(body)
    except ValueError as error:
        message = f"the body is not JSON: {error}"
        raise InvalidRequest(message) from None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False)[0]) from None


def _refusal(problem: ErrorDetails) -> EngineError:
    field = ""
    for step in (*problem["loc"], *_named(problem)):
        if isinstance(step, int):
            field += f"[{step}]"
        elif step not in (_TEXT, _IDS):
            field += f".{step}" if field else step
    if problem["type"] == _NOT_OFFERED:
        return UnsupportedFeature(f"{field} {problem['msg']}", field=field)
    says = problem["msg"] if problem["type"] == _UNKNOWN else f"is refused: {problem['msg']}"
    return InvalidRequest(f"{field or 'the body'} {says}", field=field)


def _named(problem: ErrorDetails) -> list[str]:
    """The field that our own checks name; pydantic's have it in their place."""
    if problem["type"] not in (_NOT_OFFERED, _UNKNOWN):
        return []
    return [str(problem["ctx"]["name"])[:_MAX_SHOWN_CHARS]]
