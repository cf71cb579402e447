"""How many pages are kept free for requests that run, and who gives its pages back when there are too few."""

import math
from collections.abc import Sequence

from scheduler_svc.core.request import Request
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state import SchedulerState

_RETRACTION_HEADROOM_TOKENS = 20


def reserve_target(request: Request, ratio: float, settings: CoreSettings) -> int:
    """Length up to which pages are kept free for a request: what is known or planned, and a share of what may come."""
    begin = max(request.planned_len, request.sampled_len)
    left = request.final_kv_len - begin
    if left <= 0:
        return min(begin, request.final_kv_len)
    return begin + max(1, math.ceil(ratio * min(left, settings.reserve_clip_tokens)))


def choose_victim(running: Sequence[Request]) -> Request | None:
    """The request to retract: a paused one, else the fewest outputs, then the youngest. None if there is no other.

    The oldest that is not paused is never chosen.
    """
    oldest = min(running, key=lambda request: (request.standing.is_paused, request.standing.seniority))
    others = [request for request in running if request is not oldest]
    return min(others, key=_worth, default=None)


def _worth(request: Request) -> tuple[bool, int, int]:
    return not request.standing.is_paused, request.output_len, -request.standing.seniority


def decay_ratio(state: SchedulerState) -> None:
    """One decode step without trouble: a little less caution."""
    settings = state.settings
    step = (settings.new_token_ratio_start - settings.new_token_ratio_floor) / settings.new_token_ratio_decay_steps
    state.new_token_ratio = max(settings.new_token_ratio_floor, state.new_token_ratio - step)


def raise_ratio(state: SchedulerState, running: Sequence[Request]) -> None:
    """After a retraction: at least the share of their output that those who stay have used, and some headroom."""
    outputs = sum(request.output_len for request in running)
    most = sum(request.spec.max_tokens for request in running)
    ratio = (outputs + _RETRACTION_HEADROOM_TOKENS * len(running)) / (most + 1)
    state.new_token_ratio = min(1.0, max(state.new_token_ratio, ratio))
