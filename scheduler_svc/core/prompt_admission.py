"""Part of the core's door: whether every worker can answer what is wanted of a prompt."""

from collections.abc import Sequence

from protos.wire.enums import Feature, HiddenMode
from protos.wire.errors import EngineError, InvalidRequest, UnsupportedFeature
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.events import PromptWants, StateUse


def prompt_refusal(wants: PromptWants, infos: Sequence[WorkerInfo], *, prompt_len: int) -> EngineError | None:
    """Why the request is not taken; None if it is."""
    for feature, is_needed, field in (
        (Feature.PROMPT_LOGPROBS, wants.logprobs_from is not None, "prompt_logprobs"),
        (Feature.HIDDEN_STATES, wants.states is not None, "hidden_states"),
    ):
        if is_needed and any(feature not in info.features for info in infos):
            return UnsupportedFeature(f"the worker lacks {feature.name}", field=field)
    if wants.logprobs_from is not None:
        limit = min(info.limits.max_logprobs for info in infos)
        if not 0 <= wants.top_logprobs <= limit:
            message = f"prompt_logprobs.top is {wants.top_logprobs}, the limit is {limit}"
            return InvalidRequest(message, field="prompt_logprobs.top")
        if not 1 <= wants.logprobs_from <= prompt_len:
            message = f"prompt_logprobs.start is {wants.logprobs_from}, the prompt has {prompt_len} tokens"
            return InvalidRequest(message, field="prompt_logprobs.start")
    return None if wants.states is None else _states_refusal(wants.states, infos, prompt_len=prompt_len)


def _states_refusal(use: StateUse, infos: Sequence[WorkerInfo], *, prompt_len: int) -> EngineError | None:
    needed = HiddenMode.LAST if use is StateUse.LAST else HiddenMode.FULL
    allowed = min(info.max_hidden_mode for info in infos)
    if needed > allowed:
        message = f"hidden mode {needed.name} is needed, the workers allow {allowed.name}"
        return UnsupportedFeature(message, field="hidden_states")
    most = min(info.limits.max_hidden_states for info in infos)
    if use is StateUse.FULL and prompt_len > most:
        message = f"the prompt has {prompt_len} tokens, at most {most} hidden states can be given"
        return InvalidRequest(message, field="hidden_states")
    page_size = max(info.sub_pools[0].page_size for info in infos)
    if most < (1 if use is StateUse.LAST else page_size):
        message = f"the workers give {most} hidden states a plan, a page has {page_size} tokens"
        return UnsupportedFeature(message, field="hidden_states")
    return None
