"""The door of the core: may this request wait at all. Every refusal names field, value and limit."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from protos.wire.enums import Feature, FinishReason
from protos.wire.errors import EngineError, InvalidRequest, Loading, NeverFits, UnsupportedFeature
from scheduler_svc.core.events import RequestSpec, RequestSubmitted
from scheduler_svc.core.plan_size import plan_size
from scheduler_svc.core.prompt_admission import prompt_refusal
from scheduler_svc.core.queue_hint import forecast, queue_full
from scheduler_svc.core.request_rules import empty_field, needs_counts, needs_mask
from scheduler_svc.core.settings import PolicyKind
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.stopping import finish_reason
from scheduler_svc.core.worker_facts import WorkerFacts
from scheduler_svc.memory.page_demand import SequenceCapacity

_WAIT_SHARE = 0.25
"""Of the time it has left, what a request may be expected to wait: long queues help nobody, and favour short ones."""


def refusal(state: SchedulerState, spec: RequestSpec) -> EngineError | None:
    """Why the request is not taken; None if it is."""
    for check in _CHECKS:
        error = check(state, spec)
        if error is not None:
            return error
    return None


def output_refusal(state: SchedulerState, event: RequestSubmitted) -> EngineError | None:
    """Why it cannot go on behind the output that its caller has; None if it can."""
    known = event.output_ids
    if not known:
        return None
    if len(known) > event.spec.max_tokens:
        message = f"{len(known)} output tokens are known, max_tokens is {event.spec.max_tokens}"
        return InvalidRequest(message, field="output_ids")
    return _foreign_id(known, width=_logits_width(state), field="output_ids")


def known_end(event: RequestSubmitted) -> FinishReason | None:
    """Why the output that its caller has is whole; None if it goes on."""
    known = event.output_ids
    return finish_reason(event.spec, known[-1], output_len=len(known)) if known else None


def never_fits(state: SchedulerState, spec: RequestSpec) -> NeverFits | None:
    """Whether no known worker could ever hold the whole request; told of the worker that comes nearest to it."""
    problems = [_worker_problem(facts, spec) for facts in state.known.values()]
    if None in problems:
        return None
    return max(filter(None, problems), key=lambda problem: problem.reach).error


class _Problem(NamedTuple):
    """Why one worker cannot hold a request."""

    reach: tuple[int, int]
    """The limit that is passed, later ones being nearer to a fit, and how far that one goes."""
    error: NeverFits


def _worker_problem(facts: WorkerFacts, spec: RequestSpec) -> _Problem | None:
    total, context, capacity = len(spec.prompt_ids) + spec.max_tokens, facts.info.limits.context_tokens, facts.capacity
    has_output = spec.max_tokens > 0
    said = f"prompt and max_tokens are {total} tokens" if has_output else f"the prompt has {total} tokens"
    field = "max_tokens" if has_output else "prompt_ids"
    if total > context:
        return _Problem((0, context), NeverFits(f"{said}, the context holds {context}", field=field))
    if total > capacity.tokens:
        return _Problem((1, capacity.tokens), NeverFits(f"{said}, {_bound(capacity)}", field=field))
    size = plan_size(facts.info)
    if size.takes(spec):
        return None
    field = "sampling" if size.least(total) <= size.limit else field
    message = f"one token of this request may take a plan of more than {size.limit} bytes, the workers' limit"
    return _Problem((2, size.limit), NeverFits(message, field=field))


def _bound(capacity: SequenceCapacity) -> str:
    """What the largest memory holds, why, and which settings change that."""
    if capacity.window_tokens is None:
        return f"the largest KV pool holds {capacity.tokens} (the workers' num_pages sets that)"
    return (
        f"the KV pools hold {capacity.tokens} of one sequence: the sub-pool of the window of {capacity.window_tokens} "
        f"tokens has {capacity.usable_pages} pages of {capacity.page_size}, and a longer sequence needs "
        f"{capacity.window_pages} of them (a larger num_pages, or a smaller window of the workers or a smaller "
        "budget_tokens of the scheduler would help)"
    )


def _check_loaded(state: SchedulerState, _spec: RequestSpec) -> EngineError | None:
    if not state.known:
        return Loading("no worker has been attached yet", retry_after_ms=state.settings.retry_after_ms)
    return None


def _check_numbers(state: SchedulerState, spec: RequestSpec) -> EngineError | None:
    if len(spec.prompt_ids) == 0:
        return InvalidRequest("the prompt has 0 tokens, at least 1 is needed", field="prompt_ids")
    if spec.max_tokens < 1 and (spec.max_tokens < 0 or spec.prompt_wants is None):
        return InvalidRequest(f"max_tokens is {spec.max_tokens}, at least 1 is needed", field="max_tokens")
    low, high = int(spec.prompt_ids.min()), int(spec.prompt_ids.max())
    return _foreign_id([low if low < 0 else high], width=_logits_width(state), field="prompt_ids")


def _check_features(state: SchedulerState, spec: RequestSpec) -> EngineError | None:
    policy = state.settings.schedule_policy
    if spec.priority and policy is not PolicyKind.PRIORITY:
        message = f"priority is {spec.priority}; this server schedules by {policy.value}, which does not look at it"
        return UnsupportedFeature(f"{message} (--schedule-policy priority does)", field="priority")
    infos = [facts.info for facts in state.known.values()]
    for feature, is_needed, field in (
        (Feature.PENALTIES, needs_counts(spec), "sampling"),
        (Feature.LOGIT_BIAS, bool(spec.sampling.bias), "sampling.logit_bias"),
        (Feature.MASKS, needs_mask(spec), "sampling"),
        (Feature.OUTPUT_LOGPROBS, spec.output_logprobs, "logprobs"),
    ):
        if is_needed and any(feature not in info.features for info in infos):
            return UnsupportedFeature(f"the worker lacks {feature.name}", field=field)
    if spec.prompt_wants is not None:
        error = prompt_refusal(spec.prompt_wants, infos, prompt_len=len(spec.prompt_ids))
        if error is not None:
            return error
    limit = min(info.limits.max_logprobs for info in infos)
    if spec.output_logprobs and not 0 <= spec.top_logprobs <= limit:
        return InvalidRequest(f"top_logprobs is {spec.top_logprobs}, the limit is {limit}", field="top_logprobs")
    return None


def _check_rules(state: SchedulerState, spec: RequestSpec) -> EngineError | None:
    width = _logits_width(state)
    sampling = spec.sampling
    for field, ids in (
        ("sampling.logit_bias", [token_id for token_id, _ in sampling.bias]),
        ("sampling.allowed_token_ids", sampling.allowed_ids),
        ("sampling.banned_token_ids", sampling.banned_ids),
        ("stop.stop_token_ids", spec.stop_token_ids if spec.min_tokens else ()),
    ):
        error = _foreign_id(ids, width=width, field=field)
        if error is not None:
            return error
    empty = empty_field(spec, logits_width=width)
    if empty is not None:
        return InvalidRequest("the allowed and banned ids leave nothing to sample", field=empty)
    return None


def _logits_width(state: SchedulerState) -> int:
    """What every known worker has."""
    return min(facts.info.logits_width for facts in state.known.values())


def _foreign_id(ids: Iterable[int], *, width: int, field: str) -> InvalidRequest | None:
    """The refusal of the first that no token has."""
    bad = next((token_id for token_id in ids if not 0 <= token_id < width), None)
    return None if bad is None else InvalidRequest(f"token id {bad} is not in [0, {width})", field=field)


def _check_queue(state: SchedulerState, spec: RequestSpec) -> EngineError | None:
    settings = state.settings
    waiting = len(state.waiting)
    if waiting >= settings.max_waiting_requests:
        message = f"{waiting} requests wait, the limit is {settings.max_waiting_requests}"
        return queue_full(state, spec, message=message, field="max_waiting_requests")
    tokens = state.waiting.tokens + len(spec.prompt_ids)
    if waiting and tokens > settings.max_waiting_tokens:
        message = f"{tokens} tokens would wait, the limit is {settings.max_waiting_tokens}"
        return queue_full(state, spec, message=message, field="max_waiting_tokens")
    return None


def _check_wait(state: SchedulerState, spec: RequestSpec) -> EngineError | None:
    """Whether the request would be done by its deadline, as the workers have been lately."""
    expected = forecast(state, spec)
    left_s = spec.deadline_s - state.now
    if (
        expected is None
        or not state.streams
        or (expected.wait_s <= _WAIT_SHARE * left_s and expected.wait_s + expected.takes_s <= left_s)
    ):
        return None
    left_s = max(left_s, 0.0)
    message = (
        f"it would wait about {expected.wait_s:.1f} s and then take {expected.takes_s:.1f} s; it has {left_s:.1f} s, "
        f"of which it may wait {_WAIT_SHARE * left_s:.1f} s"
    )
    return queue_full(state, spec, message=message, field="deadline")


_Check = Callable[[SchedulerState, RequestSpec], EngineError | None]
_CHECKS: tuple[_Check, ...] = (
    _check_loaded,
    _check_numbers,
    _check_features,
    _check_rules,
    never_fits,
    _check_queue,
    _check_wait,
)
