"""What the core says against a request, told by the names of the caller's own fields.

Knows nothing of streams. The core knows a request as it was resolved: one of its names may be another one in the
caller's message, and which of several requests of a call it was stands in front.
"""

from collections.abc import Mapping
from types import MappingProxyType

from protos.wire.errors import CallerError, EngineError

_CALLERS_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "max_tokens": "stop.max_tokens",
        "prompt_ids": "prompt",
        "top_logprobs": "logprobs",
        "output_ids": "resume",
    }
)


def told_to_caller(error: EngineError, *, place: str, grammar: str | None) -> EngineError:
    """The error itself, its field named as the caller does when it is about the caller's message.

    Args:
        error: of the core.
        place: of the request in its call, such as `requests[3].`; empty where it is the call.
        grammar: the field that holds the request's grammar, if it has one.
    """
    if isinstance(error, CallerError) and error.field:
        is_grammar = error.field == "grammar" and grammar is not None
        name = grammar if is_grammar else _CALLERS_NAMES.get(error.field, error.field)
        error.rename_field(f"{place}{name}")
    return error
