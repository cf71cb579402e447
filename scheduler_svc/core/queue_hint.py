"""How long the queue takes, and refusals for lack of room or time, each with a hint when to come again. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from protos.wire.errors import QueueFull
from scheduler_svc.core.events import RequestSpec
from scheduler_svc.core.outlook import Outlook, Work
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
    uncached = 1.0 - state.foresight.prompts.cached_share
    ahead = Work(waiting.num_asking, uncached * waiting.asking_tokens, waiting.asking_outputs)
    prompt = uncached * len(spec.prompt_ids)
    outputs = state.foresight.outputs.expected(spec.max_tokens)
    both = Work(ahead.requests + 1, ahead.prompts + prompt, ahead.outputs + outputs)
    wait_s = _together_s(known, ahead)
    takes_s = min(look.takes_s(len(spec.prompt_ids), spec.max_tokens) for look in known)
    return Forecast(wait_s, takes_s, max(_together_s(known, both) - wait_s, 0.0))


def _together_s(looks: Sequence[Outlook], work: Work) -> float:
    """Until it was done, if each worker takes as much of it as it can."""
    return 1.0 / sum(1.0 / look.work_s(work) for look in looks) if work.requests else 0.0


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
