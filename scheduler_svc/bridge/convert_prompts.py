"""Bridge messages <-> what is wanted of prompts and what is said of them. Pure; beside `convert`."""

from types import MappingProxyType

import numpy as np

from protos.forwardplane.v1 import bridge_pb2, generate_pb2, sampling_pb2
from scheduler_svc.core.events import PromptAnswered, PromptStates, PromptWants, StateUse

_VALUES = np.dtype("<f4")
_IDS = np.dtype("<i4")
_DTYPE_NAMES = MappingProxyType({np.dtype("<f4"): "float32", np.dtype("<u2"): "bfloat16"})


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
        message.logprobs.values = columns.values.astype(_VALUES).tobytes()
        message.logprobs.top = columns.top_ids.shape[1]
        message.logprobs.top_ids = columns.top_ids.astype(_IDS).tobytes()
        message.logprobs.top_values = columns.top_values.astype(_VALUES).tobytes()
    if answered.states is not None:
        message.states.CopyFrom(_states_to_message(answered.states))
    return message


def prompt_logprobs(columns: bridge_pb2.PromptLogprobColumns, token_ids: np.ndarray) -> list[sampling_pb2.TokenLogprob]:
    """One for each position, in order. `token_ids`: of the prompt, from `first_pos` on."""
    values = np.frombuffer(columns.values, _VALUES).tolist()
    shape = (len(values), columns.top)
    ids = np.frombuffer(columns.top_ids, _IDS).reshape(shape).tolist()
    best = np.frombuffer(columns.top_values, _VALUES).reshape(shape).tolist()
    made = []
    for token_id, value, row_ids, row_best in zip(token_ids.tolist(), values, ids, best, strict=True):
        pairs = zip(row_ids, row_best, strict=True)
        top = [sampling_pb2.TopLogprob(token_id=top_id, logprob=top_value) for top_id, top_value in pairs]
        made.append(sampling_pb2.TokenLogprob(token_id=token_id, logprob=value, top=top))
    return made


def _states_to_message(states: PromptStates) -> generate_pb2.HiddenStates:
    return generate_pb2.HiddenStates(
        dtype=_DTYPE_NAMES[states.states.dtype],
        hidden_size=states.states.shape[1],
        first_pos=states.first_pos,
        states=states.states.tobytes(),
    )
