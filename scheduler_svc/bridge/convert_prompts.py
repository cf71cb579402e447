"""Bridge messages <-> what is wanted of prompts and what is said of them. Pure; beside `convert`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from protos.forwardplane.v1 import bridge_pb2, generate_pb2, sampling_pb2
from scheduler_svc.core.events import PromptAnswered, PromptStates, PromptWants, StateUse
from scheduler_svc.core.prompt_account import float_states

_VALUES = np.dtype("<f4")
_IDS = np.dtype("<i4")
_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType({"float32": np.dtype("<f4"), "bfloat16": np.dtype("<u2")})
_DTYPE_NAMES: Mapping[np.dtype[Any], str] = MappingProxyType({dtype: name for name, dtype in _DTYPES.items()})


def prompt_wants(message: bridge_pb2.PromptWants) -> PromptWants:
    """What an edge asks of a prompt."""
    return PromptWants(
        logprobs_from=message.logprobs_from if message.HasField("logprobs_from") else None,
        top_logprobs=message.top_logprobs,
        states=StateUse(message.states) if message.states else None,
    )


def prompt_to_message(answered: PromptAnswered) -> bridge_pb2.PromptAnswer:
    """What the core says of a prompt."""
    message = bridge_pb2.PromptAnswer()
    if answered.logprobs is not None:
        columns = answered.logprobs
        message.logprobs.first_pos = columns.first_pos
        message.logprobs.token_ids = columns.token_ids.astype(_IDS).tobytes()
        message.logprobs.values = columns.values.astype(_VALUES).tobytes()
        message.logprobs.top = columns.top_ids.shape[1]
        message.logprobs.top_ids = columns.top_ids.astype(_IDS).tobytes()
        message.logprobs.top_values = columns.top_values.astype(_VALUES).tobytes()
    if answered.states is not None:
        message.states.CopyFrom(_states_to_message(answered.states))
    return message


def prompt_logprobs(columns: bridge_pb2.PromptLogprobColumns) -> list[sampling_pb2.TokenLogprob]:
    """One for each position, in order."""
    token_ids = np.frombuffer(columns.token_ids, _IDS).tolist()
    values = np.frombuffer(columns.values, _VALUES).tolist()
    shape = (len(values), columns.top)
    ids = np.frombuffer(columns.top_ids, _IDS).reshape(shape).tolist()
    best = np.frombuffer(columns.top_values, _VALUES).reshape(shape).tolist()
    made = []
    for token_id, value, row_ids, row_best in zip(token_ids, values, ids, best, strict=True):
        pairs = zip(row_ids, row_best, strict=True)
        top = [sampling_pb2.TopLogprob(token_id=top_id, logprob=top_value) for top_id, top_value in pairs]
        made.append(sampling_pb2.TokenLogprob(token_id=token_id, logprob=value, top=top))
    return made


def state_values(states: generate_pb2.HiddenStates) -> np.ndarray:
    """[positions, hidden_size] float64; no positions where there are no states."""
    if not states.hidden_size:
        return np.empty((0, 0))
    table = np.frombuffer(states.states, _DTYPES[states.dtype]).reshape(-1, states.hidden_size)
    return float_states(table)


def _states_to_message(states: PromptStates) -> generate_pb2.HiddenStates:
    return generate_pb2.HiddenStates(
        dtype=_DTYPE_NAMES[states.states.dtype],
        hidden_size=states.states.shape[1],
        first_pos=states.first_pos,
        states=states.states.tobytes(),
    )
