"""/v1/embeddings: from a body to embeddings and back. What an embedding is, is decided in `edge/embedder`."""

import asyncio
import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from aiohttp import web

from protos.forwardplane.v1.generate_pb2 import Embedding, EmbedRequest, GenerateRequest, TokenPrompt
from protos.wire.errors import EngineError
from protos.wire.limits import DEFAULT_DEADLINE_S
from scheduler_svc.edge.call_traces import HEADER
from scheduler_svc.edge.caller_identity import CallerIdentity
from scheduler_svc.edge.edge_parts import EdgeParts
from scheduler_svc.edge.embedder import Called, Times, embeddings
from scheduler_svc.edge.http_front.answering import OK, Answered
from scheduler_svc.edge.http_front.closed_fields import parse_fields
from scheduler_svc.edge.http_front.generate_requests import rename_error
from scheduler_svc.edge.http_front.openai_requests import EmbeddingRequest, as_many, is_list_of_prompts
from scheduler_svc.edge.metrics import counting_rejections

_NAMES = {"tokens.ids": "input", "text": "input", "requests": "input", "prompt": "input", "client_tag": "user"}


async def embedding_answer(http: web.Request, body: bytes, parts: EdgeParts, caller: CallerIdentity) -> Answered:
    """Answer a call.

    Raises:
        EngineError: refused or failed.
    """
    arrived = asyncio.get_running_loop().time()
    with counting_rejections(parts.metrics):
        request = parse_fields(body, EmbeddingRequest)
    times = Times(arrived, arrived + DEFAULT_DEADLINE_S, Called(http.path, http.headers.getall(HEADER, [])))
    with _callers_words(request):
        made = await embeddings(_embed_request(request), parts, caller, times=times)
    reply = _reply(made, model=parts.link.facts.card.name, is_base64=request.encoding_format == "base64")
    return Answered(web.json_response(reply), OK)


def _embed_request(request: EmbeddingRequest) -> EmbedRequest:
    asked = EmbedRequest(pooling=request.pooling or "", normalize=request.normalize)
    for prompt in as_many(request.input):
        one = asked.requests.add(
            model=request.model,
            client_tag=request.user or "",
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
        _set_prompt(one, prompt)
    return asked


def _set_prompt(request: GenerateRequest, prompt: str | list[int]) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokens.CopyFrom(TokenPrompt(ids=prompt))


def _reply(made: Sequence[Embedding], *, model: str, is_base64: bool) -> dict[str, Any]:
    tokens = sum(one.usage.prompt_tokens for one in made)
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": _base64(one.values) if is_base64 else list(one.values),
            }
            for index, one in enumerate(made)
        ],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _base64(values: Sequence[float]) -> str:
    return base64.b64encode(np.array(values, "<f4").tobytes()).decode()


@contextmanager
def _callers_words(request: EmbeddingRequest) -> Iterator[None]:
    """Errors that pass through speak of the fields that the caller sent."""
    try:
        yield
    except EngineError as error:
        rename_error(error, _NAMES, many="input" if is_list_of_prompts(request.input) else None)
        raise
