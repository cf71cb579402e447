"""Embeddings as callers hold them, and their wire form. Beside `messages`. Knows no channel."""

from collections.abc import Sequence
from dataclasses import dataclass

from protos.client.messages import Prompt, Usage, usage_from
from protos.client.request_messages import prompt_input, prompt_list
from protos.client.wire_fields import filled
from protos.forwardplane.v1 import generate_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedOptions:
    """How vectors are made."""

    pooling: str = "last"
    """"last": the state of the last token; "mean": of all."""
    normalize: bool = True
    """Scale each to length 1."""
    model: str | None = None
    client_tag: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Embedding:
    """One input's vector."""

    values: tuple[float, ...]
    usage: Usage


def embed_request(prompts: Sequence[Prompt], options: EmbedOptions) -> generate_pb2.EmbedRequest:
    """The wire form.

    Raises:
        InvalidRequest: a value that the wire cannot carry; one prompt in place of a list.
        MessageTooLarge: no server takes a message of that size.
    """
    names = {"model": options.model, "client_tag": options.client_tag, "cache_salt": options.cache_salt or None}
    requests = [{**prompt_input(prompt), **names} for prompt in prompt_list(prompts)]
    message = generate_pb2.EmbedRequest()
    return filled(message, {"requests": requests, "pooling": options.pooling, "normalize": options.normalize})


def embeddings_from(reply: generate_pb2.EmbedReply) -> list[Embedding]:
    """One for each input, in order."""
    return [Embedding(tuple(one.values), usage_from(one.usage)) for one in reply.embeddings]
