"""Embeddings: one vector for each input, made of the model's final hidden states by requests without output.

Knows nothing of calls. The same admission, streams, records and limits as generations. Guards: a field of a request
that changes no embedding is refused by name.
"""

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from protos.forwardplane.v1.bridge_pb2 import StateUse
from protos.forwardplane.v1.generate_pb2 import (
    Embedding,
    EmbedRequest,
    GenerateRequest,
    HiddenStates,
    HiddenStateSelection,
)
from protos.wire.errors import InternalFault, InvalidRequest
from scheduler_svc.bridge.convert_prompts import state_values
from scheduler_svc.edge.caller_identity import CallerIdentity
from scheduler_svc.edge.edge_parts import EdgeParts
from scheduler_svc.edge.metrics import counting_rejections
from scheduler_svc.edge.running import running
from scheduler_svc.edge.stream_reading import whole_generation

POOLINGS: Mapping[str, StateUse.ValueType] = MappingProxyType(
    {"": StateUse.STATE_USE_LAST, "last": StateUse.STATE_USE_LAST, "mean": StateUse.STATE_USE_MEAN}
)
_USED = frozenset({"text", "chat", "tokens", "model", "client_tag", "cache_salt", "priority"})


class Called(NamedTuple):
    """How a call came."""

    method: str
    carriers: Sequence[str | bytes]
    """Its trace headers."""


class Times(NamedTuple):
    """Of one call, on the event loop's clock, and how it came."""

    arrived: float
    deadline: float
    called: Called


async def embeddings(
    request: EmbedRequest, parts: EdgeParts, caller: CallerIdentity, *, times: Times
) -> list[Embedding]:
    """One for each input, in order; all or none.

    Raises:
        EngineError: one was refused or failed.
    """
    with counting_rejections(parts.metrics), parts.traces.admitting(*times.called) as trace:
        pooled = POOLINGS.get(request.pooling)
        if pooled is None:
            raise InvalidRequest("pooling is not one of: last, mean", field="pooling")
        asked = [_as_generation(item, index) for index, item in enumerate(request.requests)]
        trace.asked(asked, operation="embeddings")
        streams = await parts.admission.open_streams(
            asked, caller, deadline=times.deadline, pooled=pooled, traceparent=trace.traceparent
        )
    link, metrics = parts.link, parts.metrics
    with running(streams, link=link, metrics=metrics, arrived=times.arrived, deadline=times.deadline, trace=trace):
        made = await asyncio.gather(*(whole_generation(stream) for stream in streams))
    normalize = request.normalize if request.HasField("normalize") else True
    return [Embedding(values=vector(one.hidden_states, normalize=normalize), usage=one.usage) for one in made]


def vector(states: HiddenStates, *, normalize: bool) -> Sequence[float]:
    """The one state as float32 numbers; scaled to length 1 if wanted, unless it is 0.

    Raises:
        InternalFault: the core sent another number of states.
    """
    table = state_values(states)
    if len(table) != 1:
        raise InternalFault(f"the core sent {len(table)} states for an embedding")
    values = table[0]
    length = float(np.sqrt(np.square(values).sum()))
    if normalize and length > 0:
        values = values / length
    numbers: list[float] = values.astype(np.float32).tolist()
    return numbers


def _as_generation(item: GenerateRequest, index: int) -> GenerateRequest:
    """The request that computes its states and nothing else."""
    for field, _ in item.ListFields():
        if field.name not in _USED:
            place = f"requests[{index}].{field.name}"
            raise InvalidRequest(f"{place} means nothing for an embedding", field=place)
    asked = GenerateRequest()
    asked.CopyFrom(item)
    asked.stop.max_tokens = 0
    asked.hidden_states = HiddenStateSelection.HIDDEN_STATE_SELECTION_LAST
    return asked
