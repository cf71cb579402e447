"""OpenAI's requests to the callers' service's, and the names of its fields back to OpenAI's.

Pure. What a value may be is checked where the gRPC door checks it.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from protos.forwardplane.v1.generate_pb2 import ChatMessage, ChatPrompt, GenerateRequest, TokenPrompt
from protos.forwardplane.v1.sampling_pb2 import SamplingParameters, StopParameters
from protos.wire.errors import EngineError, InvalidRequest, UnsupportedFeature
from scheduler_svc.edge.http_front.openai_requests import (
    ChatRequest,
    CompletionRequest,
    Message,
    as_many,
    is_list_of_prompts,
)
from scheduler_svc.edge.http_front.output_shapes import GRAMMAR_FIELDS, shape_field, shape_of

_SEEDS = 1 << 64
_MAX_SHOWN_CHARS = 64
_ID = re.compile(r"0|-?[1-9][0-9]{0,17}")
_ITEM = re.compile(r"requests\[(\d+)\]\.?")

_NAMES = {
    "sampling.": "",
    "stop.max_tokens": "max_tokens",
    "stop.stop_strings": "stop",
    "stop.": "",
    "keep_special_tokens": "skip_special_tokens",
    "client_tag": "user",
}
_CHAT_NAMES = {"chat.": "", "chat": "messages", "prompt": "messages", "logprobs": "top_logprobs", **_NAMES}
_COMPLETION_NAMES = {
    "tokens.ids": "prompt",
    "text": "prompt",
    "requests": "prompt",
    "prompt_logprobs.top": "logprobs",
    **_NAMES,
}


def chat_requests(request: ChatRequest) -> list[GenerateRequest]:
    """The one generation that a chat asks for.

    Raises:
        InvalidRequest: two fields contradict each other.
    """
    _check_stream_options(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
    if None not in (request.max_tokens, request.max_completion_tokens) and (
        request.max_tokens != request.max_completion_tokens
    ):
        message = f"max_tokens is {request.max_tokens}, max_completion_tokens {request.max_completion_tokens}"
        raise InvalidRequest(message + "; they mean the same", field="max_tokens")
    for field in ("max_tokens", "max_completion_tokens"):
        if getattr(request, field) == 0:
            message = f"{field} is 0; must be 1 or more: prompts are scored by /v1/completions, with echo and logprobs"
            raise InvalidRequest(message, field=field)
    generation = _generation(request, logprobs=(request.top_logprobs or 0) if request.logprobs else None)
    if request.max_completion_tokens is not None:
        generation.stop.max_tokens = request.max_completion_tokens
    generation.chat.CopyFrom(ChatPrompt(messages=[_turn(turn) for turn in request.messages]))
    return [generation]


def completion_requests(request: CompletionRequest) -> list[GenerateRequest]:
    """One generation for each prompt.

    Raises:
        InvalidRequest: two fields contradict each other.
    """
    _check_stream_options(request)
    is_scored = bool(request.echo) and request.logprobs is not None
    if request.max_tokens == 0 and not is_scored:
        message = "max_tokens is 0; allowed only together with echo and logprobs, which score the prompt"
        raise InvalidRequest(message, field="max_tokens")
    if is_scored and request.stream and (request.n or 1) > 1:
        message = f"n is {request.n}; the limit is 1 where echo, logprobs and stream are combined"
        raise UnsupportedFeature(message, field="n")
    if request.best_of is not None and request.best_of != (request.n or 1):
        message = "best_of is offered only equal to n: all samples are given back"
        raise UnsupportedFeature(message, field="best_of")
    common = _generation(request, logprobs=request.logprobs)
    if request.echo:
        common.echo = True
    if is_scored:
        common.prompt_logprobs.top = request.logprobs or 0
    generations = []
    for prompt in as_many(request.prompt):
        generation = GenerateRequest()
        generation.CopyFrom(common)
        if isinstance(prompt, str):
            generation.text = prompt
        else:
            generation.tokens.CopyFrom(TokenPrompt(ids=prompt))
        generations.append(generation)
    return generations


@contextmanager
def callers_words(request: ChatRequest | CompletionRequest) -> Iterator[None]:
    """Errors that pass through speak of the fields that the caller sent."""
    names = dict(_CHAT_NAMES if isinstance(request, ChatRequest) else _COMPLETION_NAMES)
    has_many = isinstance(request, CompletionRequest) and is_list_of_prompts(request.prompt)
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        names["stop.max_tokens"] = "max_completion_tokens"
    names |= dict.fromkeys(GRAMMAR_FIELDS, shape_field(request.response_format, request.structured_outputs))
    try:
        yield
    except EngineError as error:
        rename_error(error, names, many="prompt" if has_many else None)
        raise


def split_item(field: str) -> tuple[int | None, str]:
    """Which of several requests a field is of, and its name in there."""
    found = _ITEM.match(field)
    return (int(found[1]), field[found.end() :]) if found else (None, field)


def rename_error(error: EngineError, names: Mapping[str, str], *, many: str | None) -> None:
    """Speak of a field by the caller's name, with a prompt's place in the list of them, in field and message alike.

    Args:
        error: as the callers' service says it.
        names: theirs by the beginnings of ours.
        many: the field that holds a list of prompts, if it does.
    """
    item, field = split_item(error.field)
    named = _renamed(field, names)
    if many is not None and item is not None and named.startswith(many):
        named = f"{many}[{item}]{named.removeprefix(many)}"
    told = next((name for name in (error.field, field) if field and error.message.startswith(name)), None)
    if told is not None:
        error.message = named + error.message.removeprefix(told).replace("stop.", "")
    error.field = named


def _renamed(field: str, names: Mapping[str, str]) -> str:
    for ours, theirs in names.items():
        if field.startswith(ours):
            return theirs + field.removeprefix(ours)
    return field


def _turn(message: Message) -> ChatMessage:
    role = "system" if message.role == "developer" else message.role
    return ChatMessage(role=role, content="".join(part.text for part in message.content))


def _check_stream_options(request: ChatRequest | CompletionRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream to be true", field="stream_options")


def _generation(request: ChatRequest | CompletionRequest, *, logprobs: int | None) -> GenerateRequest:
    shape = shape_of(request.response_format, request.structured_outputs)
    generation = _plain_fields(request, logprobs=logprobs)
    if shape is not None:
        generation.MergeFrom(shape)
    return generation


def _biases(sent: Mapping[str, float]) -> dict[int, float]:
    """Ids come as texts; each id has one spelling, so that none can be given twice."""
    for text in sent:
        if not _ID.fullmatch(text):
            shown = text[:_MAX_SHOWN_CHARS]
            raise InvalidRequest(f"logit_bias has {shown!r}, which is not a token id", field="logit_bias")
    return {int(text): value for text, value in sent.items()}


def _plain_fields(request: ChatRequest | CompletionRequest, *, logprobs: int | None) -> GenerateRequest:
    return GenerateRequest(
        sampling=SamplingParameters(
            n=request.n,
            logit_bias=_biases(request.logit_bias or {}),
            allowed_token_ids=request.allowed_token_ids or (),
            banned_token_ids=request.banned_token_ids or (),
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            frequency_penalty=request.frequency_penalty,
            presence_penalty=request.presence_penalty,
            seed=None if request.seed is None else request.seed % _SEEDS,
        ),
        stop=StopParameters(
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            stop_strings=request.stop or (),
            stop_token_ids=request.stop_token_ids or (),
            ignore_eos=request.ignore_eos,
        ),
        model=request.model,
        client_tag=request.user or "",
        cache_salt=request.cache_salt,
        priority=request.priority,
        logprobs=logprobs,
        keep_special_tokens=None if request.skip_special_tokens is None else not request.skip_special_tokens,
    )
