"""What one call to the HTTP front asks for: the generations, how they are to come, and who words the answer."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from protos.forwardplane.v1.generate_pb2 import GenerateRequest
from scheduler_svc.edge.http_front.closed_fields import parse_fields
from scheduler_svc.edge.http_front.generate_requests import callers_words, chat_requests, completion_requests
from scheduler_svc.edge.http_front.openai_requests import ChatRequest, CompletionRequest
from scheduler_svc.edge.http_front.replies import Answer, ChatAnswer, CompletionAnswer, Head
from scheduler_svc.edge.http_front.token_logprobs import CompletionLogprobs, chat_logprobs
from scheduler_svc.edge.model_facts import ModelFacts
from scheduler_svc.edge.resolve_request import num_samples, silent_ids
from scheduler_svc.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A body that was understood. Lives as long as its call."""

    request: ChatRequest | CompletionRequest
    generations: list[GenerateRequest]

    @property
    def is_streamed(self) -> bool:
        """The answer is to come as it is made."""
        return bool(self.request.stream)

    @property
    def has_usage_event(self) -> bool:
        """A stream is to end with its usage."""
        options = self.request.stream_options
        return options is not None and bool(options.include_usage)

    def in_callers_words(self) -> AbstractContextManager[None]:
        """Errors that pass through speak of the fields that the caller sent."""
        return callers_words(self.request)

    def answer(self, head: Head, tokenizer: TextTokenizer, facts: ModelFacts) -> Answer:
        """Who words the answer."""
        if isinstance(self.request, ChatRequest):
            has_logprobs = bool(self.request.logprobs)
            return ChatAnswer(head, partial(chat_logprobs, tokenizer=tokenizer) if has_logprobs else None)
        if self.request.logprobs is None:
            return CompletionAnswer(head, None)
        writers = []
        for generation in self.generations:
            silent = silent_ids(generation, facts)
            for _ in range(num_samples(generation)):
                decoder = tokenizer.decoder(keep_special=generation.keep_special_tokens, silent_ids=silent)
                writers.append(CompletionLogprobs(tokenizer, decoder))
        return CompletionAnswer(head, writers)


def asked_of_chat(body: bytes) -> Asked:
    """What the body of a chat asks for.

    Raises:
        EngineError: refused.
    """
    request = parse_fields(body, ChatRequest)
    return Asked(request=request, generations=chat_requests(request))


def asked_of_completion(body: bytes) -> Asked:
    """What the body of a completion asks for.

    Raises:
        EngineError: refused.
    """
    request = parse_fields(body, CompletionRequest)
    return Asked(request=request, generations=completion_requests(request))
