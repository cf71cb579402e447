"""Whether the streams of one call can be served side by side at all.

A call's streams are taken together or not at all, so one with more than a limit could come again for ever. Pure.
"""

from collections.abc import Sequence

from protos.forwardplane.v1.bridge_pb2 import SubmitStream
from protos.wire.errors import NeverFits
from scheduler_svc.edge.caller_stream import CallerStream
from scheduler_svc.edge.model_facts import ModelFacts

_TOKEN_BYTES = 4


def check_call_size(
    checked: Sequence[tuple[CallerStream, SubmitStream]], facts: ModelFacts, *, max_streams: int
) -> None:
    """Whether an idle server would take the call's streams.

    Args:
        checked: all streams of the call.
        facts: with the limits of the core's queue; 0: not known yet.
        max_streams: of this edge.

    Raises:
        NeverFits: it would not; names what asks for them, how many they are, and the limit.
    """
    count = len(checked)
    if count < 2:
        return
    names = checked[0][0].names
    samples = sum(stream.names.request_id == names.request_id for stream, _ in checked)
    field = f"{names.place}sampling.n" if samples == count else "requests"
    for limit, setting in (
        (max_streams, "max_streams"),
        (names.caller.limits.max_streams or 0, "the caller's max_streams"),
        (facts.max_waiting_requests, "max_waiting_requests"),
    ):
        if limit and count > limit:
            raise NeverFits(
                f"{field} asks for {count} samples in one call; the limit is {limit}, {setting}", field=field
            )
    tokens = sum(len(submit.prompt_ids) for _, submit in checked) // _TOKEN_BYTES
    if facts.max_waiting_tokens and tokens > facts.max_waiting_tokens:
        message = (
            f"{field} asks for {count} samples in one call, whose prompts have {tokens} tokens; the queue holds "
            f"{facts.max_waiting_tokens} at most"
        )
        raise NeverFits(message, field=field)
