"""What callers may ask of a prompt itself and what they get: log-probabilities of its tokens, hidden states.

Beside `messages`. Knows no channel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from protos.forwardplane.v1 import generate_pb2, sampling_pb2
from protos.wire.errors import InvalidRequest

_SELECTIONS = MappingProxyType(
    {
        "last": generate_pb2.HIDDEN_STATE_SELECTION_LAST,
        "full": generate_pb2.HIDDEN_STATE_SELECTION_FULL,
    }
)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token; `top` is best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """What is wanted of the prompt itself. With `max_tokens=0` nothing is generated."""

    prompt_logprobs: int | None = None
    """Log-probabilities of the prompt's tokens with this many best alternatives."""
    prompt_logprobs_start: int | None = None
    """With `prompt_logprobs`: position of the first token whose log-probability is wanted. That at position 0, where
    they begin if nothing is said, has none."""
    hidden_states: str | None = None
    """Final hidden states: "last" (of the last token) or "full"."""


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Final hidden states, normalised: what the model's output layer reads."""

    dtype: str
    """"float32" or "bfloat16"."""
    hidden_size: int
    first_pos: int
    """Position of the first state."""
    states: bytes
    """Little-endian, position after position."""

    def array(self) -> np.ndarray:
        """[positions, hidden_size] float32."""
        if self.dtype == "bfloat16":
            values = (np.frombuffer(self.states, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(self.states, "<f4")
        return values.reshape(-1, self.hidden_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAnswer:
    """What a message says of the prompt."""

    first_pos: int = 0
    """Position of the first of `logprobs`."""
    logprobs: tuple[TokenLogprob, ...] = ()
    hidden_states: HiddenStates | None = None


NO_PROMPT_ANSWER = PromptAnswer()


def prompt_fields(options: PromptOptions) -> dict[str, Any]:
    """The fields of a request; unset options stay absent.

    Raises:
        InvalidRequest: hidden states of a kind that there is not, or a first position of log-probabilities that are not
            asked for.
    """
    fields: dict[str, Any] = {}
    if options.prompt_logprobs is not None:
        fields["prompt_logprobs"] = {"top": options.prompt_logprobs, "start": options.prompt_logprobs_start}
    elif options.prompt_logprobs_start is not None:
        message = "prompt_logprobs.start needs prompt_logprobs, which is not given"
        raise InvalidRequest(message, field="prompt_logprobs.start")
    if options.hidden_states is not None:
        if options.hidden_states not in _SELECTIONS:
            message = f"hidden_states is {options.hidden_states!r}; known: {', '.join(_SELECTIONS)}"
            raise InvalidRequest(message, field="hidden_states")
        fields["hidden_states"] = _SELECTIONS[options.hidden_states]
    return fields


def prompt_answer(message: generate_pb2.GenerateChunk | generate_pb2.Generation) -> PromptAnswer:
    """What a message says of the prompt."""
    states = message.hidden_states
    if not message.prompt_logprobs and not message.HasField("hidden_states"):
        return NO_PROMPT_ANSWER
    return PromptAnswer(
        first_pos=message.prompt_first_pos,
        logprobs=token_logprobs(message.prompt_logprobs),
        hidden_states=HiddenStates(states.dtype, states.hidden_size, states.first_pos, states.states)
        if message.HasField("hidden_states")
        else None,
    )


def token_logprobs(messages: Sequence[sampling_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    """One for each token."""
    return tuple(
        TokenLogprob(item.token_id, item.logprob, tuple((best.token_id, best.logprob) for best in item.top))
        for item in messages
    )
