"""A checked request and its token ids to what the core is asked: every default applied, every number final.

Pure but for the seed it is handed. Knows nothing of calls or sockets.
"""

from collections.abc import Sequence

import numpy as np

from protos.forwardplane.v1.bridge_pb2 import ResolvedSampling, SubmitStream
from protos.forwardplane.v1.generate_pb2 import GenerateRequest
from protos.forwardplane.v1.sampling_pb2 import SamplingParameters
from scheduler_svc.edge.model_facts import ModelFacts, SamplingDefaults
from scheduler_svc.edge.validate_request import output_room


def resolve_request(
    request: GenerateRequest, prompt_ids: Sequence[int], *, facts: ModelFacts, drawn_seed: int, deadline_ms: int
) -> SubmitStream:
    """The message for the core, without the names of the stream.

    Args:
        request: passed `validate_generate`.
        prompt_ids: its prompt.
        facts: of the served model.
        drawn_seed: for a request that brings none.
        deadline_ms: time left.

    Raises:
        InvalidRequest: prompt and output do not fit the context together.
    """
    return SubmitStream(
        prompt_ids=np.asarray(prompt_ids, "<i4").tobytes(),
        sampling=_sampling(request.sampling, facts.card.sampling, drawn_seed),
        max_tokens=output_room(len(prompt_ids), request, facts),
        min_tokens=request.stop.min_tokens,
        stop_token_ids=np.asarray(sorted(_stop_ids(request, facts)), "<u4").tobytes(),
        deadline_ms=deadline_ms,
        output_logprobs=request.HasField("logprobs"),
        top_logprobs=request.logprobs,
    )


def silent_ids(request: GenerateRequest, facts: ModelFacts) -> frozenset[int]:
    """Ids whose text callers never get: end-of-sequence ones, unless the request ignores that they are."""
    return frozenset() if request.stop.ignore_eos else frozenset(facts.card.eos_token_ids)


def _stop_ids(request: GenerateRequest, facts: ModelFacts) -> set[int]:
    return {*silent_ids(request, facts), *request.stop.stop_token_ids}


def _sampling(asked: SamplingParameters, defaults: SamplingDefaults, drawn_seed: int) -> ResolvedSampling:
    return ResolvedSampling(
        temperature=asked.temperature if asked.HasField("temperature") else defaults.temperature,
        top_p=asked.top_p if asked.HasField("top_p") else defaults.top_p,
        top_k=asked.top_k if asked.HasField("top_k") else defaults.top_k,
        min_p=asked.min_p if asked.HasField("min_p") else defaults.min_p,
        seed=asked.seed if asked.HasField("seed") else drawn_seed,
        repetition_penalty=asked.repetition_penalty if asked.HasField("repetition_penalty") else 1.0,
        frequency_penalty=asked.frequency_penalty,
        presence_penalty=asked.presence_penalty,
    )
