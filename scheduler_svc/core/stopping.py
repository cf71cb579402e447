"""When a request ends by itself. Stop strings are matched at the edge, which cancels with reason STOP."""

from protos.wire.enums import FinishReason
from scheduler_svc.core.events import RequestSpec


def finish_reason(spec: RequestSpec, token_id: int, *, output_len: int) -> FinishReason | None:
    """Why `token_id`, the output's token number `output_len`, ends the request; None if it goes on.

    A stop id among the first `min_tokens` output tokens does not end it.
    """
    if token_id in spec.stop_token_ids and output_len > spec.min_tokens:
        return FinishReason.STOP
    if output_len >= spec.max_tokens:
        return FinishReason.LENGTH
    return None
