"""A checked request and its token ids to what the core is asked: every default applied, every number final.

Pure. Knows nothing of calls or sockets.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from protos.forwardplane.v1.bridge_pb2 import (
    CoreModel,
    Grammar,
    PromptWants,
    ResolvedSampling,
    StateUse,
    SubmitStream,
)
from protos.forwardplane.v1.generate_pb2 import GenerateRequest
from protos.forwardplane.v1.sampling_pb2 import SamplingParameters
from protos.service.model_files import GenerationDefaults, ModelCard
from protos.wire.enums import HiddenMode
from protos.wire.errors import EngineError, InvalidModelFile, InvalidRequest
from scheduler_svc.edge.field_rules import SAMPLING_RULES, check_fields
from scheduler_svc.edge.model_facts import ModelFacts, model_facts
from scheduler_svc.edge.validate_request import HIDDEN_MODES, grammar_source, output_room

_STATE_USES: Mapping[HiddenMode, StateUse.ValueType] = MappingProxyType(
    {
        HiddenMode.NULL: StateUse.STATE_USE_UNSPECIFIED,
        HiddenMode.LAST: StateUse.STATE_USE_LAST,
        HiddenMode.FULL: StateUse.STATE_USE_FULL,
    }
)


def resolve_request(
    request: GenerateRequest, prompt_ids: Sequence[int], *, facts: ModelFacts, seed: int, deadline_ms: int
) -> SubmitStream:
    """The message for the core, without the names of the stream.

    Args:
        request: passed `validate_generate`.
        prompt_ids: its prompt.
        facts: of the served model.
        seed: of its ticket.
        deadline_ms: time left.

    Raises:
        InvalidRequest: prompt and output do not fit the context together, or nothing of the prompt is left to score.
    """
    return SubmitStream(
        prompt_ids=np.asarray(prompt_ids, "<i4").tobytes(),
        sampling=_sampling(request.sampling, facts.card.generation, seed),
        max_tokens=output_room(len(prompt_ids), request, facts),
        min_tokens=request.stop.min_tokens,
        stop_token_ids=_ids(_stop_ids(request, facts)),
        deadline_ms=deadline_ms,
        output_logprobs=request.HasField("logprobs"),
        top_logprobs=request.logprobs,
        priority=request.priority,
        grammar=grammar_message(request),
        prompt_wants=_prompt_wants(request, num_prompt_tokens=len(prompt_ids)),
    )


def _prompt_wants(request: GenerateRequest, *, num_prompt_tokens: int) -> PromptWants | None:
    has_logprobs = request.HasField("prompt_logprobs")
    if not (has_logprobs or request.hidden_states):
        return None
    wants = PromptWants(states=_STATE_USES[HIDDEN_MODES[request.hidden_states]])
    if has_logprobs:
        start = request.prompt_logprobs.start
        if start and start >= num_prompt_tokens:
            message = f"prompt_logprobs.start is {start}; allowed: [0, {num_prompt_tokens - 1}], the prompt's positions"
            raise InvalidRequest(message, field="prompt_logprobs.start")
        wants.logprobs_from = max(start, 1)
        wants.top_logprobs = request.prompt_logprobs.top
    return wants


def num_samples(request: GenerateRequest) -> int:
    """How many outputs it asks for."""
    return request.sampling.n if request.sampling.HasField("n") else 1


def grammar_message(request: GenerateRequest) -> Grammar | None:
    """What its output has to match; None: nothing."""
    source = grammar_source(request)
    return None if source is None else Grammar(kind=source.kind, source=source.text)


def check_generation_defaults(card: ModelCard) -> None:
    """Refuse a model whose own settings would be refused from a caller.

    Raises:
        InvalidModelFile: names the setting and its limits.
    """
    facts = model_facts(card, CoreModel(), has_chat_template=False)
    try:
        check_fields(_own_settings(card.generation), SAMPLING_RULES, facts)
    except EngineError as error:
        raise InvalidModelFile(f"model.json: generation: {error.message}", field=error.field) from error


def silent_ids(request: GenerateRequest, facts: ModelFacts) -> frozenset[int]:
    """Ids whose text callers never get: end-of-sequence ones, unless the request ignores that they are."""
    return frozenset() if request.stop.ignore_eos else frozenset(facts.card.eos_token_ids)


def _stop_ids(request: GenerateRequest, facts: ModelFacts) -> set[int]:
    return {*silent_ids(request, facts), *request.stop.stop_token_ids}


def _sampling(asked: SamplingParameters, defaults: GenerationDefaults, seed: int) -> ResolvedSampling:
    own = _own_settings(defaults)
    own.MergeFrom(asked)
    bias = dict(sorted(own.logit_bias.items()))
    return ResolvedSampling(
        temperature=own.temperature if own.HasField("temperature") else 1.0,
        top_p=own.top_p if own.HasField("top_p") else 1.0,
        top_k=own.top_k,
        min_p=own.min_p,
        seed=seed,
        repetition_penalty=own.repetition_penalty if own.HasField("repetition_penalty") else 1.0,
        frequency_penalty=own.frequency_penalty,
        presence_penalty=own.presence_penalty,
        bias_ids=np.fromiter(bias, "<u4", len(bias)).tobytes(),
        bias_values=np.fromiter(bias.values(), "<f4", len(bias)).tobytes(),
        allowed_ids=_ids(own.allowed_token_ids),
        banned_ids=_ids(own.banned_token_ids),
    )


def _own_settings(defaults: GenerationDefaults) -> SamplingParameters:
    return SamplingParameters(
        temperature=defaults.temperature,
        top_p=defaults.top_p,
        top_k=defaults.top_k,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
    )


def _ids(ids: Iterable[int]) -> bytes:
    return np.array(sorted(set(ids)), "<u4").tobytes()
