"""What a grammar's mask does to its request: the row may be planned, or the request fails."""

from protos.wire.errors import EngineError, InvalidRequest
from scheduler_svc.core.events import Instruction, MaskReady
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.transitions import fail


def take_mask(state: SchedulerState, event: MaskReady, out: list[Instruction]) -> None:
    """Give the mask to its request, unless that has ended or is past the position."""
    request = state.streams.get(event.stream)
    if request is None or request.rules is None or not request.awaits_mask or event.position != request.output_len:
        return
    if isinstance(event.answer, EngineError):
        fail(state, request, error=event.answer, out=out)
    elif not request.rules.set_grammar_mask(event.position, event.answer):
        message = f"the grammar and the other limits on tokens leave nothing to sample after {event.position} tokens"
        fail(state, request, error=InvalidRequest(message, field="grammar"), out=out)
