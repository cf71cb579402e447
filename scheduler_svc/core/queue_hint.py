"""How long the queue takes, and refusals for lack of room or time, each with a hint when to come again. Pure."""

from typing import NamedTuple

from protos.wire.errors import QueueFull
from scheduler_svc.core.events import RequestSpec
from scheduler_svc.core.state import SchedulerState


class Forecast(NamedTuple):
    """Of a request that would wait behind all others."""

    wait_s: float
    """Until it is placed."""
    takes_s: float
    """From then until it is done."""
    work_s: float
    """How much longer all workers are busy with it."""


def forecast(state: SchedulerState, spec: RequestSpec) -> Forecast | None:
    """None: not enough was measured to say."""
    looks = [state.foresight.last_outlook(worker, now=state.now) for worker in state.workers.values()]
    known = [look for look in looks if look.is_known]
    if not known or len(known) < len(looks):
        return None
    waiting = state.waiting
    tokens_s = sum(1 / look.token_s for look in known)
    own_tokens = len(spec.prompt_ids) + state.foresight.outputs.expected(spec.max_tokens)
    takes_s = min(look.takes_s(len(spec.prompt_ids), spec.max_tokens) for look in known)
    return Forecast((waiting.asking_tokens + waiting.asking_outputs) / tokens_s, takes_s, own_tokens / tokens_s)


def queue_full(state: SchedulerState, spec: RequestSpec, *, message: str, field: str) -> QueueFull:
    """With a hint: when it would be done in time, or half of the queue is placed, behind those sent away before."""
    settings = state.settings
    hint_s = settings.retry_after_ms / 1e3
    expected = forecast(state, spec)
    if expected is not None:
        left_s = max(spec.deadline_s - state.now, 0.0)
        room_in_s = max(expected.wait_s + expected.takes_s - left_s, expected.wait_s / 2, hint_s)
        hint_s = state.foresight.sent_away.hint_s(
            state.now, room_in_s=room_in_s, takes_s=expected.work_s, patience_s=left_s
        )
    hint_ms = min(max(int(hint_s * 1e3), settings.retry_after_ms), settings.most_retry_after_ms)
    return QueueFull(message, field=field, retry_after_ms=hint_ms)
