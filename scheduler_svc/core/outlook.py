"""Whether requests would be done in time: what one worker's load does to the deadlines of those on it.

A worker's rows share each step, so one more row makes all of them slower. With R rows that are replaced as they end, a
step computes R tokens and the prefill of those that come:

    step(R) = stretch * cost(R + R * prefill tokens per output token, at most those of the largest plan measured)

Pure; made for one look, and knows only what had been measured by then.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from scheduler_svc.core.cost_model import CostModel, PlanShape
from scheduler_svc.core.output_lengths import OutputLengths
from scheduler_svc.core.request import Request, RequestStatus
from scheduler_svc.core.worker_state import WorkerState

_OWN_SHARE = 0.6
"""Of the time that is left, what a request as long as those that run may be expected to take when it is placed."""
_LOST_SHARE = 0.5
"""A row that would be late even with so many of the rows is not waited for."""

_LEAST_S = 1e-6
"""Of a step: a model that was fitted to few shapes may say that tokens cost nothing."""
_CONTEXT = 1024
"""Any number of tokens: it is for the model's slope."""


class Work(NamedTuple):
    """What requests that are not placed yet want done."""

    requests: int
    prompts: float
    """Tokens to be prefilled."""
    outputs: float
    """Tokens."""


class Outlook:
    """Of one worker."""

    def __init__(self, worker: WorkerState, outputs: OutputLengths, *, stretch: float, now: float) -> None:
        self.is_known = worker.cost.is_ready
        """Whether enough was measured to say anything."""
        self._outputs = outputs
        self._now = now
        self._rows = 0
        self._context = 0
        self._backlog = 0
        """Tokens of prompts that are not planned yet."""
        self._prefill_share = 0.0
        """Prefill tokens per output token."""
        self._typical_output = 0.0
        self._least_s = math.inf
        """The longest step with which every row is in time."""
        self._most_prefill = float(worker.cost.most_tokens)
        """Tokens of a step beside its rows: the rest of the prompts waits for the next one."""
        self._most_tokens = max(worker.cost.most_tokens, 1)
        self._row_limit = worker.row_limit
        self._capacity_tokens = worker.memory.capacity.tokens
        self._costs_s = (0.0, 0.0, 0.0)
        """Of a plan, of each of its tokens, of each token of its context."""
        if self.is_known:
            self._costs_s = _costs_s(worker.cost, stretch)
            self._look_at([request for request in worker.running.values() if not request.standing.is_paused])

    def work_s(self, work: Work) -> float:
        """How long the worker would be at it, with as many rows at once as there is room, memory and time for.

        What waits is mostly prompts, or few rows run yet: the present tokens a second would say nothing of it.
        """
        if not work.requests:
            return 0.0
        rows = self._rows_at_once(work)
        row_len = (self._context + work.prompts) / (self._rows + work.requests)
        plan_s, token_s, context_s = self._costs_s
        tokens = work.prompts + work.outputs
        steps = max(work.outputs / rows, tokens / max(self._most_tokens, rows))
        return max(_LEAST_S, steps * (plan_s + context_s * row_len * rows) + tokens * token_s)

    def takes_s(self, known_tokens: int, most_tokens: int) -> float:
        """From the placement of a request, at the present load, until it is done.

        Args:
            known_tokens: to be prefilled.
            most_tokens: of output.
        """
        return self._prefill_s(known_tokens) + self._expected(most_tokens) * self._step_s(self._rows + 1)

    def has_room(self, request: Request) -> bool:
        """Whether it and those that run would be done in time if it were placed now.

        It is taken to be as long as those that run. Where not even an empty worker could have done that much in its
        time, those are of another kind: then its own length counts. No time is kept for what waiting never helped.
        """
        if not self.is_known or not self._rows or request.standing.has_run:
            return True
        step_s = self._step_s(self._rows + 1)
        if step_s > self._least_s:
            return False
        deadline_s, outputs = request.spec.deadline_s, self._expected(request.spec.max_tokens)
        given_s = _OWN_SHARE * (deadline_s - request.standing.queued_at)
        if self._alone_s(request.sampled_len, self._typical_output) <= given_s:
            outputs = max(outputs, self._typical_output)
        elif self._alone_s(request.sampled_len, outputs) > given_s:
            return True
        return self._prefill_s(request.sampled_len) + outputs * step_s <= _OWN_SHARE * (deadline_s - self._now)

    def is_late(self, request: Request) -> bool:
        """Whether it could not be done in time even if it were placed now."""
        if not self.is_known or request.standing.has_run:
            return False
        return self._now + self.takes_s(request.sampled_len, request.spec.max_tokens) > request.spec.deadline_s

    def add(self, request: Request) -> None:
        """It is placed."""
        if self.is_known:
            self._rows += 1
            self._context += request.sampled_len
            self._backlog += request.sampled_len
            left = self._expected(request.spec.max_tokens - request.output_len)
            self._least_s = min(self._least_s, (request.spec.deadline_s - self._now - self._prefill_s(0)) / left)

    def _look_at(self, running: Sequence[Request]) -> None:
        if not running:
            return
        self._rows = len(running)
        left = [self._expected(request.spec.max_tokens - request.output_len) for request in running]
        outputs = sum(left)
        prompts = 0
        for request in running:
            self._context += request.sampled_len
            outputs += request.output_len
            prompts += request.prompt_len - (request.cache_use.cached_tokens or 0)
            if request.status is RequestStatus.PREFILLING:
                self._backlog += request.sampled_len - request.planned_len
        self._prefill_share = prompts / outputs
        self._typical_output = outputs / self._rows
        lost_s = self._step_s(self._rows * _LOST_SHARE)
        begin = self._now + self._prefill_s(0)
        steps_s = [(request.spec.deadline_s - begin) / tokens for request, tokens in zip(running, left, strict=True)]
        self._least_s = min((step_s for step_s in steps_s if step_s >= lost_s), default=math.inf)

    def _step_s(self, rows: float) -> float:
        """A step with so many rows like those that run."""
        plan_s, token_s, context_s = self._costs_s
        context = self._context * rows / self._rows if self._rows else 0.0
        return max(_LEAST_S, plan_s + token_s * self._tokens(rows) + context_s * context)

    def _tokens(self, rows: float) -> float:
        """Of a step with so many rows."""
        return rows + min(rows * self._prefill_share, self._most_prefill)

    def _rows_at_once(self, work: Work) -> int:
        """At least those that run, and one."""
        least = max(self._rows, 1)
        row_tokens = max((work.prompts + work.outputs) / work.requests, 1.0)
        most = min(self._rows + work.requests, self._row_limit, int(self._capacity_tokens / row_tokens))
        return least + bisect_right(range(least + 1, most + 1), self._least_s, key=self._step_s)

    def _prefill_s(self, tokens: int) -> float:
        """Of the prompts on the worker and so many tokens more."""
        return (self._backlog + tokens) * self._costs_s[1]

    def _alone_s(self, known_tokens: int, outputs: float) -> float:
        """What so much would take without the others."""
        return known_tokens * self._costs_s[1] + outputs * self._step_s(1)

    def _expected(self, most_tokens: int) -> float:
        return max(1.0, self._outputs.expected(most_tokens))


def _costs_s(cost: CostModel, stretch: float) -> tuple[float, float, float]:
    """The three coefficients of the model, which is linear, in real time."""
    plan_s = cost.predict_s(PlanShape(0, 0))
    token_s = cost.predict_s(PlanShape(1, 0)) - plan_s
    context_s = (cost.predict_s(PlanShape(0, _CONTEXT)) - plan_s) / _CONTEXT
    return stretch * plan_s, stretch * token_s, stretch * context_s
