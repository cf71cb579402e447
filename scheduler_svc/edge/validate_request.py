"""The door: a caller's request is refused here, before anything is spent on it, or it is good.

Fields one by one are in `field_rules`; here is what depends on several of them or on the served model.
"""

from collections.abc import Mapping
from types import MappingProxyType

from protos.forwardplane.v1.generate_pb2 import (
    AbortRequest,
    ChatPrompt,
    DetokenizeRequest,
    GenerateRequest,
    HiddenStateSelection,
    TokenizeRequest,
)
from protos.wire.enums import HiddenMode
from protos.wire.errors import InvalidRequest, UnknownModel, UnsupportedFeature
from protos.wire.limits import MAX_GRAMMAR_BYTES, MAX_PROMPT_BYTES, MAX_PROMPTS_PER_CALL
from scheduler_svc.edge.field_rules import ABORT_RULES, DETOKENIZE_RULES, GENERATE_RULES, TOKENIZE_RULES, check_fields
from scheduler_svc.edge.model_facts import ModelFacts
from scheduler_svc.text.grammar_source import GrammarKind, GrammarSource, choice_source

_MAX_SHOWN_CHARS = 64

HIDDEN_MODES: Mapping[int, HiddenMode] = MappingProxyType(
    {
        HiddenStateSelection.HIDDEN_STATE_SELECTION_UNSPECIFIED: HiddenMode.NULL,
        HiddenStateSelection.HIDDEN_STATE_SELECTION_LAST: HiddenMode.LAST,
        HiddenStateSelection.HIDDEN_STATE_SELECTION_FULL: HiddenMode.FULL,
    }
)


def validate_generate(request: GenerateRequest, facts: ModelFacts) -> None:
    """Everything that can be checked without tokenising.

    Raises:
        UnknownModel: it names another model.
        InvalidRequest: a value, or two together, make no sense.
        UnsupportedFeature: it asks for what this model or this release does not offer.
    """
    if request.HasField("model") and request.model != facts.card.name:
        asked = request.model[:_MAX_SHOWN_CHARS]
        raise UnknownModel(f"model is {asked!r}; this server serves {facts.card.name!r}", field="model")
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt is missing: one of text, chat or tokens", field="prompt")
    if kind == "chat":
        _check_chat(request.chat, facts)
    check_fields(request, GENERATE_RULES, facts)
    stop = request.stop
    if kind == "tokens" and stop.stop_strings:
        message = "stop.stop_strings cannot be combined with a prompt of token ids; use stop.stop_token_ids"
        raise InvalidRequest(message, field="stop.stop_strings")
    if stop.HasField("max_tokens") and stop.min_tokens > stop.max_tokens:
        message = f"stop.min_tokens is {stop.min_tokens}; the limit is stop.max_tokens, {stop.max_tokens}"
        raise InvalidRequest(message, field="stop.min_tokens")
    _check_output(request)
    _check_grammar(request, facts)


def check_num_requests(count: int) -> None:
    """Whether so many requests may come in one call.

    Raises:
        InvalidRequest: none, or too many.
    """
    if not count:
        raise InvalidRequest("requests is empty", field="requests")
    if count > MAX_PROMPTS_PER_CALL:
        message = f"requests has {count} items; the limit is {MAX_PROMPTS_PER_CALL}"
        raise InvalidRequest(message, field="requests")


def check_hidden_states(request: GenerateRequest, allowed: HiddenMode) -> None:
    """Whether callers may have the hidden states that a checked request asks for.

    Raises:
        UnsupportedFeature: this server keeps them to itself.
    """
    asked = HIDDEN_MODES[request.hidden_states]
    if asked > allowed:
        message = f"hidden_states is {asked.name}; this server gives its callers {allowed.name} (--max-hidden-mode)"
        raise UnsupportedFeature(message, field="hidden_states")


def _check_output(request: GenerateRequest) -> None:
    """A request without output asks for something of its prompt, and for nothing that output could have."""
    if not request.stop.HasField("max_tokens") or request.stop.max_tokens:
        return
    if not (request.HasField("prompt_logprobs") or request.hidden_states):
        message = "stop.max_tokens is 0; allowed only together with prompt_logprobs or hidden_states"
        raise InvalidRequest(message, field="stop.max_tokens")
    if request.sampling.n > 1:
        message = f"sampling.n is {request.sampling.n}; the limit is 1 where stop.max_tokens is 0"
        raise InvalidRequest(message, field="sampling.n")
    kind = request.WhichOneof("grammar")
    if kind is not None:
        raise InvalidRequest(f"{kind} cannot be combined with stop.max_tokens 0", field=kind)


def grammar_source(request: GenerateRequest) -> GrammarSource | None:
    """What the output of a request has to match; None: nothing."""
    kind = request.WhichOneof("grammar")
    if kind is None:
        return None
    if GrammarKind(kind) is GrammarKind.CHOICE:
        return choice_source(request.choice.texts)
    return GrammarSource(GrammarKind(kind), getattr(request, kind))


def _check_grammar(request: GenerateRequest, facts: ModelFacts) -> None:
    source = grammar_source(request)
    if source is None:
        return
    if request.stop.ignore_eos:
        message = f"stop.ignore_eos cannot be combined with {source.kind}: the output ends when it is complete"
        raise InvalidRequest(message, field="stop.ignore_eos")
    if not facts.card.eos_token_ids:
        message = f"{source.kind} needs a model with an end-of-sequence token, which this one lacks"
        raise UnsupportedFeature(message, field=source.kind)
    size = len(source.text.encode())
    if size > MAX_GRAMMAR_BYTES:
        message = f"{source.kind} has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}"
        raise InvalidRequest(message, field=source.kind)


def validate_tokenize(request: TokenizeRequest, facts: ModelFacts) -> None:
    """As `validate_generate`, for the input of a `Tokenize`."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("input is missing: one of text or chat", field="input")
    if kind == "chat":
        _check_chat(request.chat, facts)
    check_fields(request, TOKENIZE_RULES, facts)


def validate_detokenize(request: DetokenizeRequest, facts: ModelFacts) -> None:
    """As `validate_generate`, for a `Detokenize`."""
    check_fields(request, DETOKENIZE_RULES, facts)


def validate_abort(request: AbortRequest, facts: ModelFacts) -> None:
    """As `validate_generate`, for an `Abort`."""
    check_fields(request, ABORT_RULES, facts)


def output_room(num_prompt_tokens: int, request: GenerateRequest, facts: ModelFacts) -> int:
    """Most output tokens of a request whose prompt has that many tokens.

    Raises:
        InvalidRequest: the prompt leaves no room, or less than was asked for.
    """
    context = facts.context_tokens
    room = context - num_prompt_tokens
    if num_prompt_tokens < 1:
        raise InvalidRequest("prompt gives no tokens", field="prompt")
    stop = request.stop
    needs_room = not (stop.HasField("max_tokens") and stop.max_tokens == 0)
    if room < needs_room:
        message = f"prompt has {num_prompt_tokens} tokens; the context of {context} leaves no room for output"
        raise InvalidRequest(message, field="prompt")
    fits = max(min(room, facts.capacity_tokens - num_prompt_tokens), 1)
    asked = stop.max_tokens if stop.HasField("max_tokens") else fits
    if asked > room:
        message = (
            f"stop.max_tokens is {asked}; the limit is {room}, since the prompt has {num_prompt_tokens} tokens "
            f"and the context {context}"
        )
        raise InvalidRequest(message, field="stop.max_tokens")
    if stop.min_tokens > asked:
        message = f"stop.min_tokens is {stop.min_tokens}; the limit is {asked}, what fits the context"
        raise InvalidRequest(message, field="stop.min_tokens")
    return asked


def _check_chat(chat: ChatPrompt, facts: ModelFacts) -> None:
    if not facts.has_chat_template:
        message = f"model {facts.card.name} has no chat template; send the prompt as raw text"
        raise UnsupportedFeature(message, field="chat")
    size = sum(len(message.content) for message in chat.messages)
    if size > MAX_PROMPT_BYTES:
        raise InvalidRequest(f"chat has {size} bytes or more; the limit is {MAX_PROMPT_BYTES}", field="chat")
