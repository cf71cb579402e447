"""What a grammar's mask does to its request: the row may be planned, or the request ends.

An output that matches and cannot go on is whole: it ends as at an end-of-sequence id, even where the request's own
limits keep that id from being sampled.
"""

from protos.wire.enums import FinishReason
from protos.wire.errors import EngineError, InvalidRequest
from scheduler_svc.core.events import Instruction, MaskReady
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.transitions import fail, finish


def take_mask(state: SchedulerState, event: MaskReady, out: list[Instruction]) -> None:
    """Give the mask to its request, unless that has ended or is past the position."""
    request = state.streams.get(event.stream)
    if request is None or request.rules is None or not request.awaits_mask or event.position != request.output_len:
        return
    if isinstance(event.answer, EngineError):
        fail(state, request, error=event.answer, out=out)
    elif not request.rules.set_grammar_mask(event.position, event.answer):
        if event.is_complete and (request.account is None or request.account.is_told):
            finish(state, request, reason=FinishReason.STOP, out=out)
            return
        message = f"the grammar and the other limits on tokens leave nothing to sample after {event.position} tokens"
        fail(state, request, error=InvalidRequest(message, field="grammar"), out=out)
