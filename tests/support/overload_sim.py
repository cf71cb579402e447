"""The core under an open-loop load, in virtual time: a device whose plans cost what a linear rule says.

Deterministic, and as fast as the core is. Callers take what they get: nobody comes again after a refusal.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from protos.wire.enums import FinishReason, RowStatus
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardOutcome, ForwardResult, PlanTimings, ResultColumns
from scheduler_svc.core.events import (
    Event,
    Instruction,
    RequestFinished,
    RequestRefused,
    RequestSpec,
    RequestSubmitted,
    ResultReceived,
    Sampling,
    SendPlan,
    StreamKey,
    WorkerAttached,
)
from scheduler_svc.core.scheduler import step, wake_at
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state import SchedulerState
from tests.support.plans import full_sub_pool, make_info, make_limits


@dataclass(frozen=True)
class Device:
    """What a plan costs, in seconds."""

    base: float = 0.005
    per_token: float = 0.0011
    per_context: float = 1e-7

    def plan_s(self, plan: ForwardPlan) -> float:
        return self.base + self.per_token * len(plan.tokens.ids) + self.per_context * int(plan.rows.seq_lens.sum())


@dataclass(frozen=True)
class Load:
    """Poisson arrivals; lengths are uniform."""

    rate: float
    seconds: float = 30.0
    deadline_s: float = 8.0
    prompt: tuple[int, int] = (48, 160)
    output: tuple[int, int] = (16, 48)
    max_tokens: int | None = None
    """Asked for; None: what comes. More than comes: the output ends by a stop id."""
    seed: int = 0

    def arrivals(self) -> Iterator[tuple[float, int, int]]:
        """Time, prompt tokens, output tokens."""
        draw, at = random.Random(self.seed), 0.0
        while (at := at + draw.expovariate(self.rate)) < self.seconds:
            yield at, draw.randint(*self.prompt), draw.randint(*self.output)


@dataclass
class Outcome:
    """What became of the requests."""

    finished: list[tuple[float, int]] = field(default_factory=list)
    """When, and how many tokens."""
    late: list[float] = field(default_factory=list)
    """When."""
    refused: list[tuple[float, float]] = field(default_factory=list)
    """When, and the seconds since it had arrived."""
    hints_ms: list[int | None] = field(default_factory=list)
    empty_at: float = 0.0

    def goodput(self, begin: float, end: float) -> float:
        return sum(tokens for at, tokens in self.finished if begin <= at < end) / (end - begin)


class Simulation:
    """One run."""

    def __init__(
        self,
        load: Load,
        *,
        device: Device | None = None,
        settings: CoreSettings | None = None,
        stretch: float = 1.0,
    ) -> None:
        """Begin with one worker.

        Args:
            load: to come.
            device: of the worker.
            settings: of the core.
            stretch: how many times as long as its device time a plan takes.
        """
        self._load = load
        self._stretch = stretch
        self._device = device or Device()
        self.state = SchedulerState.create(settings or CoreSettings())
        info = replace(
            make_info(sub_pools=(full_sub_pool(num_pages=8192),)), limits=make_limits(context_tokens=1 << 20)
        )
        self._now = 0.0
        self._plans: list[ForwardPlan] = []
        self._device_free_at = 0.0
        self._arrived: dict[StreamKey, float] = {}
        self._lengths: dict[int, int] = {}
        self.outcome = Outcome()
        self._step([WorkerAttached("w0", info, 1, 1)])

    def run(self) -> Outcome:
        """Until everything has ended."""
        arrivals = self._load.arrivals()
        pending = next(arrivals, None)
        while pending is not None or self.state.streams:
            done_at = self._done_at()
            due = [at for at in (pending and pending[0], done_at, wake_at(self.state)) if at is not None]
            self._now = max(self._now, min(due))
            events: list[Event] = []
            if done_at is not None and done_at <= self._now:
                events.append(ResultReceived("w0", self._answer(self._plans.pop(0))))
                self._device_free_at = done_at
            while pending is not None and pending[0] <= self._now:
                events.append(RequestSubmitted(self._spec(pending)))
                pending = next(arrivals, None)
            self._step(events)
        self.outcome.empty_at = self._now
        return self.outcome

    def _done_at(self) -> float | None:
        return self._device_free_at + self._stretch * self._device.plan_s(self._plans[0]) if self._plans else None

    def _step(self, events: list[Event]) -> None:
        for instruction in step(self.state, events, self._now):
            self._take(instruction)

    def _take(self, instruction: Instruction) -> None:
        outcome = self.outcome
        match instruction:
            case SendPlan(_, plan):
                if not self._plans:
                    self._device_free_at = self._now
                self._plans.append(plan)
            case RequestFinished(reason=reason, usage=usage):
                if reason is FinishReason.DEADLINE:
                    outcome.late.append(self._now)
                else:
                    outcome.finished.append((self._now, usage.output_tokens))
            case RequestRefused(stream, error):
                outcome.refused.append((self._now, self._now - self._arrived[stream]))
                outcome.hints_ms.append(error.retry_after_ms)

    def _spec(self, arrival: tuple[float, int, int]) -> RequestSpec:
        at, prompt, output = arrival
        number = len(self._arrived)
        stream = StreamKey(0, number)
        self._arrived[stream] = at
        ids = np.random.default_rng(number).integers(2, 1000, prompt, dtype=np.int32)
        ids[0] = output
        stops = frozenset() if self._load.max_tokens is None else frozenset({1})
        return RequestSpec(
            stream=stream,
            request_id=str(number),
            prompt_ids=ids,
            sampling=Sampling(),
            max_tokens=self._load.max_tokens or output,
            deadline_s=at + self._load.deadline_s,
            stop_token_ids=stops,
        )

    def _answer(self, plan: ForwardPlan) -> ForwardResult:
        """Every row that samples gets a token; the last of an output is the stop id."""
        rows = plan.rows
        by_handle = {request.handle: request for request in self.state.streams.values()}
        tokens = []
        for handle, seq_len in zip(rows.handles.tolist(), rows.seq_lens.tolist(), strict=True):
            request = by_handle.get(handle)
            is_last = request is not None and seq_len - request.prompt_len + 1 >= int(request.spec.prompt_ids[0])
            tokens.append(1 if is_last else 7)
        columns = ResultColumns(
            handles=rows.handles,
            attempts=rows.attempts,
            positions=rows.seq_lens - 1,
            statuses=np.where(rows.samples, RowStatus.TOKEN, RowStatus.NONE).astype(np.uint8),
            token_ids=np.array(tokens, np.int32),
        )
        (forward,) = plan.forwards
        spent_ns = int(self._device.plan_s(plan) * 1e9)
        outcome = ForwardOutcome(
            mode=forward.mode, graph=forward.graph, real_tokens=len(tokens), padded_tokens=0, forward_ns=spent_ns
        )
        timings = PlanTimings(forward_ns=spent_ns)
        return ForwardResult(identity=plan.identity, rows=columns, forwards=(outcome,), timings=timings)
