"""What one call to the HTTP front asks for: the generations, how they are to come, and who words the answer."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from protos.forwardplane.v1.generate_pb2 import GenerateRequest
from scheduler_svc.edge.caller_stream import CallerStream, StreamNames
from scheduler_svc.edge.http_front.closed_fields import parse_fields
from scheduler_svc.edge.http_front.generate_requests import callers_words, chat_requests, completion_requests
from scheduler_svc.edge.http_front.openai_requests import ChatRequest, CompletionRequest
from scheduler_svc.edge.http_front.replies import Answer, ChatAnswer, CompletionAnswer, Head, Json, Part
from scheduler_svc.edge.http_front.token_logprobs import CompletionLogprobs, EchoedLogprobs, EchoedPrompt, chat_logprobs
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

    def answer(
        self, head: Head, streams: Sequence[CallerStream], *, tokenizer: TextTokenizer, facts: ModelFacts
    ) -> Answer:
        """Who words the answer of `streams`, which are those of the generations."""
        if isinstance(self.request, ChatRequest):
            has_logprobs = bool(self.request.logprobs)
            return ChatAnswer(head, partial(chat_logprobs, tokenizer=tokenizer) if has_logprobs else None)
        if self.request.logprobs is None:
            return CompletionAnswer(head, None)
        writers: list[Callable[[Part], Json]] = []
        for generation in self.generations:
            names = streams[len(writers)].names
            writers += _writers(generation, names, tokenizer=tokenizer, facts=facts)
        return CompletionAnswer(head, writers)


def _writers(
    generation: GenerateRequest, names: StreamNames, *, tokenizer: TextTokenizer, facts: ModelFacts
) -> list[Callable[[Part], Json]]:
    """Of each sample's `logprobs`. `names`: of the first one's stream."""
    silent = silent_ids(generation, facts)
    echoed = None if names.prompt_text is None else _echoed_prompt(generation, names, tokenizer=tokenizer, facts=facts)
    writers: list[Callable[[Part], Json]] = []
    for sample in range(num_samples(generation)):
        decoder = tokenizer.decoder(keep_special=generation.keep_special_tokens, silent_ids=silent)
        output = CompletionLogprobs(tokenizer, decoder, first_offset=len(names.prompt_text or ""))
        if echoed is None:
            writers.append(partial(_of_output, output))
        else:
            writers.append(partial(_of_both, EchoedLogprobs(echoed, output, is_first_sample=sample == 0)))
    return writers


def _echoed_prompt(
    generation: GenerateRequest, names: StreamNames, *, tokenizer: TextTokenizer, facts: ModelFacts
) -> EchoedPrompt:
    assert names.first_prompt_id is not None
    is_servers = generation.WhichOneof("prompt") == "text" and facts.card.add_bos
    writer = CompletionLogprobs(tokenizer, tokenizer.decoder(keep_special=True))
    return EchoedPrompt(writer, names.first_prompt_id, has_text=not is_servers)


def _of_output(writer: CompletionLogprobs, part: Part) -> Json:
    return writer.of(part.logprobs)


def _of_both(writer: EchoedLogprobs, part: Part) -> Json:
    return writer.of(part.prompt_logprobs, part.logprobs)


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
