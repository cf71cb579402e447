"""Requests of callers in their wire form. Beside `messages`. Knows no channel."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from protos.client.messages import Chat, GenerateOptions, GrammarOptions, Prompt, SamplingOptions, StopOptions, TokenIds
from protos.client.prompt_messages import prompt_fields
from protos.client.wire_fields import filled
from protos.forwardplane.v1 import generate_pb2
from protos.wire.errors import InvalidRequest


def generate_request(prompt: Prompt, options: GenerateOptions) -> generate_pb2.GenerateRequest:
    """The wire form of one request; unset options stay absent.

    Raises:
        InvalidRequest: two grammars, of which the wire would keep one; a value that the wire cannot carry.
        MessageTooLarge: no server takes a message of that size.
    """
    return filled(generate_pb2.GenerateRequest(), request_fields(prompt, options))


def request_fields(prompt: Prompt, options: GenerateOptions) -> dict[str, Any]:
    """What `filled` makes a request of.

    Raises:
        InvalidRequest: two grammars.
    """
    return {
        **prompt_input(prompt),
        "sampling": _said(options, SamplingOptions),
        "stop": {**_said(options, StopOptions), "ignore_eos": options.ignore_eos or None},
        "model": options.model,
        "client_tag": options.client_tag,
        "logprobs": options.logprobs,
        "keep_special_tokens": options.keep_special_tokens or None,
        "cache_salt": options.cache_salt or None,
        "priority": options.priority or None,
        "echo": options.echo or None,
        **prompt_fields(options),
        **_grammar(options),
    }


def prompt_input(prompt: Prompt) -> dict[str, Any]:
    """The one field that holds the prompt."""
    if isinstance(prompt, Chat):
        turns = [{"role": role, "content": content} for role, content in prompt.messages]
        return {"chat": {"messages": turns}}
    return {"tokens": {"ids": prompt.ids}} if isinstance(prompt, TokenIds) else {"text": prompt}


def prompt_list(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """The same prompts.

    Raises:
        InvalidRequest: it is one prompt. A text is a sequence of texts as well: each character would be a prompt.
    """
    if isinstance(prompts, str | Chat | TokenIds):
        raise InvalidRequest("prompts is one prompt; must be a list of prompts", field="prompts")
    return prompts


def tokenize_request(prompt: str | Chat) -> generate_pb2.TokenizeRequest:
    """The wire form of a text or chat to be tokenised.

    Raises:
        InvalidRequest, MessageTooLarge: as `generate_request`.
    """
    return filled(generate_pb2.TokenizeRequest(), prompt_input(prompt))


def generate_once_request(prompts: Sequence[Prompt], options: GenerateOptions) -> generate_pb2.GenerateOnceRequest:
    """The wire form of several prompts.

    Raises:
        InvalidRequest, MessageTooLarge: as `generate_request`.
    """
    requests = [_placed_fields(index, prompt, options) for index, prompt in enumerate(prompt_list(prompts))]
    return filled(generate_pb2.GenerateOnceRequest(), {"requests": requests})


def detokenize_request(token_ids: Sequence[int]) -> generate_pb2.DetokenizeRequest:
    """The wire form of ids to be made text.

    Raises:
        InvalidRequest, MessageTooLarge: as `generate_request`.
    """
    return filled(generate_pb2.DetokenizeRequest(), {"token_ids": token_ids})


def abort_request(request_id: str) -> generate_pb2.AbortRequest:
    """The wire form of an abort.

    Raises:
        InvalidRequest: as `generate_request`.
    """
    return filled(generate_pb2.AbortRequest(), {"request_id": request_id})


def _placed_fields(index: int, prompt: Prompt, options: GenerateOptions) -> dict[str, Any]:
    """As `request_fields`, of one of several prompts; refusals say of which."""
    try:
        return request_fields(prompt, options)
    except InvalidRequest as error:
        error.place_field(f"requests[{index}].")
        raise


def _said(options: GenerateOptions, group: type[SamplingOptions | StopOptions]) -> dict[str, Any]:
    return {option.name: getattr(options, option.name) for option in fields(group)}


def _grammar(options: GrammarOptions) -> dict[str, Any]:
    choice = {"texts": options.choice} if options.choice else None
    kinds = {"json_schema": options.json_schema, "regex": options.regex, "ebnf": options.ebnf, "choice": choice}
    given = {name: value for name, value in kinds.items() if value is not None}
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} cannot be combined", field=next(iter(given)))
    return given
