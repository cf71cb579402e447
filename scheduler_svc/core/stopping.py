"""When a request ends by itself. Stop strings are matched at the edge, which cancels with reason STOP."""

from protos.wire.enums import FinishReason
from scheduler_svc.core.request import Request


def finish_reason(request: Request, token_id: int) -> FinishReason | None:
    """Why `token_id`, just appended, ends the request; None if it goes on.

    A stop id among the first `min_tokens` output tokens does not end it.
    """
    spec = request.spec
    if token_id in spec.stop_token_ids and request.output_len > spec.min_tokens:
        return FinishReason.STOP
    if request.output_len >= spec.max_tokens:
        return FinishReason.LENGTH
    return None


def may_sample_again(request: Request) -> bool:
    """Whether, after everything planned, one more token may be sampled without passing `max_tokens`."""
    return request.planned_len < request.final_kv_len
