"""What the numbers of a caller's request may be, by the field's path: for the door that checks them and for clients.

The door knows the model and tightens what depends on it.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from protos.wire import limits
from protos.wire.validate_sampling import SMALLEST_F32


class Range(NamedTuple):
    """Both ends are allowed."""

    low: float
    high: float

    def shown(self) -> str:
        """As messages say it."""
        high = "what the model allows" if self.high == math.inf else show_number(self.high)
        return f"[{show_number(self.low)}, {high}]"


_BY_MODEL = math.inf
_MAX_SHOWN_BITS = 128
_ADDITIVE = Range(-limits.MAX_ADDITIVE_PENALTY, limits.MAX_ADDITIVE_PENALTY)
_TOKEN_ID = Range(0, _BY_MODEL)

REQUEST_RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "tokens.ids": _TOKEN_ID,
        "sampling.temperature": Range(0, limits.MAX_TEMPERATURE),
        "sampling.top_p": Range(SMALLEST_F32, 1),
        "sampling.top_k": Range(0, _BY_MODEL),
        "sampling.min_p": Range(0, 1),
        "sampling.repetition_penalty": Range(SMALLEST_F32, limits.MAX_REPETITION_PENALTY),
        "sampling.frequency_penalty": _ADDITIVE,
        "sampling.presence_penalty": _ADDITIVE,
        "sampling.seed": Range(0, (1 << 64) - 1),
        "sampling.n": Range(1, limits.MAX_SAMPLES),
        "sampling.logit_bias": Range(-limits.MAX_LOGIT_BIAS, limits.MAX_LOGIT_BIAS),
        "sampling.allowed_token_ids": _TOKEN_ID,
        "sampling.banned_token_ids": _TOKEN_ID,
        "stop.max_tokens": Range(0, _BY_MODEL),
        "stop.min_tokens": Range(0, _BY_MODEL),
        "stop.stop_token_ids": _TOKEN_ID,
        "logprobs": Range(0, limits.MAX_LOGPROBS),
        "prompt_logprobs.top": Range(0, limits.MAX_LOGPROBS),
        "prompt_logprobs.start": Range(0, _BY_MODEL),
        "priority": Range(-limits.MAX_PRIORITY, limits.MAX_PRIORITY),
        "resume.token_ids": _TOKEN_ID,
        "resume.text_bytes": Range(0, (1 << 32) - 1),
        "resume.prompt_logprobs": Range(0, _BY_MODEL),
        "token_ids": _TOKEN_ID,
    }
)
"""Of lists and maps: of each number in them. `token_ids` is that of a `Detokenize`."""


def show_number(value: float) -> str:
    """A number as messages say it: short, however long it is."""
    if not isinstance(value, int):
        return f"{value:g}"
    return str(value) if value.bit_length() <= _MAX_SHOWN_BITS else f"a number of {value.bit_length()} bits"
