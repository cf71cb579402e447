"""Generations and chunks as OpenAI's objects: plain dictionaries, ready for JSON.

Pure but for the tokenizer's tables. One `Answer` speaks for one call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from protos.forwardplane.v1.generate_pb2 import GenerateChunk, Generation
from protos.forwardplane.v1.sampling_pb2 import Finish, FinishReason, TokenLogprob, Usage

Json = dict[str, Any]
Part = GenerateChunk | Generation

# Other ends are errors, and told as such.
_FINISH_REASONS = {FinishReason.FINISH_REASON_STOP: "stop", FinishReason.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every object of one call begins with."""

    request_id: str
    created: int
    model: str
    fingerprint: str
    has_usage: bool = False
    """A stream's last object carries the usage."""


class Answer(Protocol):
    """How one route answers one call."""

    def whole(self, generations: Sequence[Generation]) -> Json:
        """The one object of an answer that is not streamed."""
        ...

    def events(self, index: int, chunk: GenerateChunk) -> list[Json]:
        """What the next chunk of that stream becomes."""
        ...

    def usage_event(self, usages: Sequence[Usage]) -> Json:
        """The last object of a stream, when usage was asked for."""
        ...


class ChatAnswer:
    """/v1/chat/completions."""

    def __init__(self, head: Head, logprobs: Callable[[Sequence[TokenLogprob]], Json] | None) -> None:
        """Speak for one call.

        Args:
            head: of all objects.
            logprobs: writes them; None when they were not asked for.
        """
        self._head = head
        self._logprobs = logprobs

    def whole(self, generations: Sequence[Generation]) -> Json:
        """The one object of an answer that is not streamed."""
        choices = []
        for index, made in enumerate(generations):
            message = {"role": "assistant", "content": made.text, "refusal": None}
            choices.append({"index": index, "message": message, "logprobs": self._log(made), **_end(made.finish)})
        reply = _object(self._head, "chatcmpl", "chat.completion", choices)
        return {**reply, "usage": usage_of([made.usage for made in generations])}

    def events(self, index: int, chunk: GenerateChunk) -> list[Json]:
        """Text, if there is any; then the end, if it is reached."""
        events = []
        if chunk.request_id or chunk.text or chunk.logprobs:
            role = {"role": "assistant"} if chunk.request_id else {}
            delta = {**role, "content": chunk.text}
            events.append({"index": index, "delta": delta, "logprobs": self._log(chunk), **_end(None)})
        if chunk.finish.reason in _FINISH_REASONS:
            events.append({"index": index, "delta": {}, "logprobs": None, **_end(chunk.finish)})
        return [_event(self._head, "chatcmpl", "chat.completion.chunk", [choice]) for choice in events]

    def usage_event(self, usages: Sequence[Usage]) -> Json:
        """The last object of a stream, when usage was asked for."""
        return {**_event(self._head, "chatcmpl", "chat.completion.chunk", []), "usage": usage_of(usages)}

    def _log(self, part: Part) -> Json | None:
        return None if self._logprobs is None else self._logprobs(part.logprobs)


class CompletionAnswer:
    """/v1/completions."""

    def __init__(self, head: Head, logprobs: Sequence[Callable[[Part], Json]] | None) -> None:
        """Speak for one call.

        Args:
            head: of all objects.
            logprobs: one writer for each stream; None when they were not asked for.
        """
        self._head = head
        self._logprobs = logprobs

    def whole(self, generations: Sequence[Generation]) -> Json:
        """The one object of an answer that is not streamed."""
        choices = [self._choice(index, made, made.finish) for index, made in enumerate(generations)]
        reply = _object(self._head, "cmpl", "text_completion", choices)
        return {**reply, "usage": usage_of([made.usage for made in generations])}

    def events(self, index: int, chunk: GenerateChunk) -> list[Json]:
        """One object with what the chunk holds, unless that is nothing."""
        is_end = chunk.finish.reason in _FINISH_REASONS
        if not (is_end or chunk.text or chunk.logprobs or chunk.prompt_text or chunk.prompt_logprobs):
            return []
        choice = self._choice(index, chunk, chunk.finish if is_end else None)
        return [_event(self._head, "cmpl", "text_completion", [choice])]

    def usage_event(self, usages: Sequence[Usage]) -> Json:
        """The last object of a stream, when usage was asked for."""
        return {**_event(self._head, "cmpl", "text_completion", []), "usage": usage_of(usages)}

    def _choice(self, index: int, part: Part, finish: Finish | None) -> Json:
        logprobs = None if self._logprobs is None else self._logprobs[index](part)
        return {"index": index, "text": part.prompt_text + part.text, "logprobs": logprobs, **_end(finish)}


def usage_of(usages: Sequence[Usage]) -> Json:
    """Token counts of all generations of a call."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    output = sum(usage.output_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


def _end(finish: Finish | None) -> Json:
    """Why it ended, and the stop string or the id that ended it."""
    if finish is None:
        return {"finish_reason": None, "stop_reason": None}
    matched = finish.WhichOneof("matched")
    stop_reason = None if matched is None else getattr(finish, matched)
    return {"finish_reason": _FINISH_REASONS[finish.reason], "stop_reason": stop_reason}


def _object(head: Head, prefix: str, name: str, choices: list[Json]) -> Json:
    return {
        "id": f"{prefix}-{head.request_id}",
        "object": name,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
        "choices": choices,
    }


def _event(head: Head, prefix: str, name: str, choices: list[Json]) -> Json:
    made = _object(head, prefix, name, choices)
    if head.has_usage:
        made["usage"] = None
    return made
