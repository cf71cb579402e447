"""What callers of the HTTP front may send, as closed frozen models: types here, limits in `field_rules`.

Knows nothing of HTTP. Guards: a field is used, or has its neutral value, or is refused by name.
"""

from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from protos.wire.limits import (
    MAX_CHAT_MESSAGES,
    MAX_LISTED_TOKEN_IDS,
    MAX_LOGIT_BIAS_IDS,
    MAX_PROMPT_TOKENS,
    MAX_PROMPTS_PER_CALL,
    MAX_STOP_TOKEN_IDS,
)
from scheduler_svc.edge.http_front.body_refusals import HIDDEN_TAG, WRONG_KIND
from scheduler_svc.edge.http_front.closed_fields import ClosedFields, Neutral
from scheduler_svc.edge.http_front.output_shapes import ResponseFormat, StructuredOutputs

_TEXT, _IDS, _MANY = (f"{HIDDEN_TAG}{kind}" for kind in ("text", "ids", "many"))

_CHAT_NEUTRAL: Neutral = MappingProxyType(
    {
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "metadata": ({},),
        "modalities": (["text"],),
        "moderation": (),
        "parallel_tool_calls": (),
        "prediction": (),
        "prompt_cache_key": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "reasoning_effort": (),
        "safety_identifier": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none",),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }
)
_COMPLETION_NEUTRAL: Neutral = MappingProxyType({"suffix": ("",)})
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


def _one_or_more(value: Any) -> Any:
    return _list_of(value, "has to be a text or a list of texts", one=value)


def _kind_of_prompt(value: Any) -> str | None:
    if isinstance(value, list):
        return _IDS
    return _TEXT if isinstance(value, str) else None


def _kind_of_prompts(value: Any) -> str | None:
    """A list that begins with a number is one prompt of ids; else it holds prompts."""
    is_many = isinstance(value, list) and not (value and isinstance(value[0], int | float))
    return _MANY if is_many else _kind_of_prompt(value)


def as_many(value: str | list[int] | list[str | list[int]]) -> list[str | list[int]]:
    """One prompt or several, as a list. Of one kind and not empty, as the fields' types say."""
    if isinstance(value, str) or isinstance(value[0], int):
        return [value]
    return value


def is_list_of_prompts(value: str | list[int] | list[str | list[int]]) -> bool:
    """Whether it was sent as a list of prompts, of which there may be one."""
    return as_many(value) is value


def _parts(value: Any) -> Any:
    return _list_of(value, "has to be a text or a list of parts", one={"type": "text", "text": value})


def _list_of(value: Any, needed: str, *, one: Any) -> Any:
    """`value` if it is a list, or a list of `one` if it is a text."""
    if not isinstance(value, list | str):
        raise PydanticCustomError(WRONG_KIND, "{needed}", {"needed": needed})
    return [one] if isinstance(value, str) else value


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS_IDS:
        raise PydanticCustomError(WRONG_KIND, f"has {len(value)} items; the limit is {MAX_LOGIT_BIAS_IDS}")
    return value


Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Int32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
Ids = Annotated[list[Int64], Field(fail_fast=True, max_length=MAX_PROMPT_TOKENS)]
Listed = Annotated[list[Int64], Field(fail_fast=True, max_length=MAX_LISTED_TOKEN_IDS)]
Prompt = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[Ids, Tag(_IDS)],
    Discriminator(
        _kind_of_prompt,
        custom_error_type=WRONG_KIND,
        custom_error_message="has to be a text or a list of token ids",
    ),
]
_Many = Annotated[list[Prompt], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS_PER_CALL)]
Prompts = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[Ids, Tag(_IDS)] | Annotated[_Many, Tag(_MANY)],
    Discriminator(
        _kind_of_prompts,
        custom_error_type=WRONG_KIND,
        custom_error_message="has to be a text, a list of token ids, or a list of texts or of lists of token ids",
    ),
]
"""One prompt or several, as they were sent, so that errors name their places."""


class StreamOptions(ClosedFields):
    """What a stream carries beside text."""

    neutral: ClassVar[Neutral] = MappingProxyType({"include_obfuscation": (False,)})

    include_usage: bool | None = None


class CallFields(ClosedFields):
    """Whom a request is for, and how the answer comes."""

    model: str | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: Int32 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class SamplingFields(ClosedFields):
    """How tokens are drawn. Absent: as in the gRPC door."""

    n: Count | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_few_biases)] | None = None
    allowed_token_ids: Listed | None = None
    banned_token_ids: Listed | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: Seed | None = None


class StopFields(ClosedFields):
    """When the output ends, what of it is text, and what it has to match."""

    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    stop: Annotated[list[str], Field(fail_fast=True), BeforeValidator(_one_or_more)] | None = None
    stop_token_ids: Annotated[list[Int64], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class TextPart(ClosedFields):
    """A part of a message's content; only text is offered."""

    type: Literal["text"]
    text: str


class Message(ClosedFields):
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

    prompt: Prompts
    logprobs: Count | None = None
    echo: bool | None = None
    best_of: Count | None = None


class EmbeddingRequest(ClosedFields):
    """Body of /v1/embeddings."""

    neutral: ClassVar[Neutral] = MappingProxyType({"dimensions": ()})

    model: str | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: Int32 | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
