"""What callers hold: prompts, options, chunks and generations as frozen types. What they send is in `request_messages`.

Shared by the sync and the asyncio client, so that both say the same thing. Knows no channel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from protos.client.prompt_messages import (
    NO_PROMPT_ANSWER,
    PromptAnswer,
    PromptOptions,
    TokenLogprob,
    prompt_answer,
    token_logprobs,
)
from protos.forwardplane.v1 import generate_pb2, sampling_pb2
from protos.wire.enums import FinishReason


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat prompt: (role, content) pairs, rendered by the model's own template on the server."""

    messages: tuple[tuple[str, str], ...]

    @staticmethod
    def user(content: str) -> "Chat":
        """One question of a user."""
        return Chat((("user", content),))


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt of token ids, taken as they are."""

    ids: tuple[int, ...]


Prompt = str | Chat | TokenIds
"""Text is raw: no template is applied."""


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """When and beside whom a request runs."""

    cache_salt: str = ""
    """Cached prefixes are shared only between this caller's requests with the same salt."""
    priority: int = 0
    """Higher goes first where the server schedules by priority: -10 .. 10. Other servers refuse all but 0."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn. `None` leaves the choice to the server."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    """Samples of one prompt."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these ids."""
    allowed_token_ids: tuple[int, ...] = ()
    """None: all."""
    banned_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StopOptions:
    """When the output ends. `None` leaves the choice to the server."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    """Before an end-of-sequence or stop id may come. A stop string or a whole match of a grammar ends it sooner."""
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class GrammarOptions:
    """What the output has to match; at most one of them."""

    json_schema: str | None = None
    """A schema, as JSON."""
    regex: str | None = None
    ebnf: str | None = None
    """A grammar in Lark syntax."""
    choice: tuple[str, ...] = ()
    """One of these texts."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(SamplingOptions, StopOptions, SchedulingOptions, GrammarOptions, PromptOptions):
    """What a caller may say about one request: `GenerateOptions(max_tokens=64, temperature=0)`."""

    logprobs: int | None = None
    """Log-probabilities of output tokens with this many best alternatives: the model's own distribution, before
    temperature, penalties, bias, bans and grammar."""
    keep_special_tokens: bool = False
    echo: bool = False
    """Give the prompt's text back, as `prompt_text`."""
    model: str | None = None
    client_tag: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Why and by what a request ended."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one message of a stream released."""

    request_id: str
    first_pos: int
    token_ids: tuple[int, ...]
    text: str
    text_offset: int
    logprobs: tuple[TokenLogprob, ...]
    finish: Finish | None
    usage: Usage | None
    seed: int | None
    sample_index: int = 0
    prompt_text: str | None = None
    """First chunk only, when asked for."""
    prompt: PromptAnswer = NO_PROMPT_ANSWER
    """First chunks only, when asked for: each position and state comes once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A whole answer."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish: Finish
    usage: Usage
    seed: int
    sample_index: int = 0
    prompt_text: str | None = None
    """When asked for."""
    prompt: PromptAnswer = NO_PROMPT_ANSWER
    """As far as asked for; of several samples of one prompt only sample 0 has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What a server serves."""

    name: str
    context_tokens: int
    vocab_size: int
    logits_width: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    dtype: str
    numerics: str
    version: str


def chunk_from(message: generate_pb2.GenerateChunk) -> Chunk:
    """One message of a stream."""
    return Chunk(
        request_id=message.request_id,
        first_pos=message.first_pos,
        token_ids=tuple(message.token_ids),
        text=message.text,
        text_offset=message.text_offset,
        logprobs=token_logprobs(message.logprobs),
        finish=_finish(message.finish) if message.HasField("finish") else None,
        usage=usage_from(message.usage) if message.HasField("usage") else None,
        seed=message.seed if message.HasField("seed") else None,
        sample_index=message.sample_index,
        prompt_text=message.prompt_text if message.HasField("prompt_text") else None,
        prompt=prompt_answer(message),
    )


def generation_from(message: generate_pb2.Generation) -> Generation:
    """One whole answer."""
    return Generation(
        request_id=message.request_id,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=token_logprobs(message.logprobs),
        finish=_finish(message.finish),
        usage=usage_from(message.usage),
        seed=message.seed,
        sample_index=message.sample_index,
        prompt_text=message.prompt_text if message.HasField("prompt_text") else None,
        prompt=prompt_answer(message),
    )


def model_from(message: generate_pb2.GetModelReply) -> ModelDescription:
    """What a server serves."""
    return ModelDescription(
        name=message.name,
        context_tokens=message.context_tokens,
        vocab_size=message.vocab_size,
        logits_width=message.logits_width,
        eos_token_ids=tuple(message.eos_token_ids),
        has_chat_template=message.has_chat_template,
        dtype=message.dtype,
        numerics=message.numerics,
        version=message.version,
    )


def usage_from(message: sampling_pb2.Usage) -> Usage:
    """Token counts."""
    return Usage(message.prompt_tokens, message.cached_tokens, message.output_tokens)


def _finish(message: sampling_pb2.Finish) -> Finish:
    matched = message.WhichOneof("matched")
    return Finish(
        reason=FinishReason(message.reason),
        stop_token_id=message.stop_token_id if matched == "stop_token_id" else None,
        stop_string=message.stop_string if matched == "stop_string" else None,
    )
