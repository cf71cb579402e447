"""Life of one worker under load, step by step in virtual time: how fast are tokens, how long do requests wait? Pure.

Follows the scheduler's rules: every decode row rides in every plan, the token budget buys prefill beside them, `window`
plans are in flight, so a request that ends makes room for the next one only some plans later. Left out: retraction (a
request waits until all its pages fit), callers' networks, tokenising.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from protos.client.capacity_costs import PlanShape, StepCost
from protos.wire.step_budget import CPU_BUDGET, StepBudget, whole_pages

TURNAROUND_S = 0.003
"""From a request's last token to the next request of the same caller."""
_DRAWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShape:
    """What bounds a plan and what a worker holds."""

    page_size: int = 16
    num_pages: int | None = None
    """Usable KV pages; None: without bound."""
    max_rows: int = 256
    max_tokens: int = CPU_BUDGET.most_tokens
    """Of one plan."""
    window: int = 2
    budget_tokens: int | None = None
    """Prefill tokens of a plan; None: what fits the target step time."""
    budget: StepBudget = CPU_BUDGET
    """Where `budget_tokens` is None."""


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request."""

    prompt_tokens: int
    """Without those that are found in the cache."""
    cached_tokens: int
    output_tokens: int

    @property
    def total_tokens(self) -> int:
        """Length at its end."""
        return self.prompt_tokens + self.cached_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLoad:
    """Requests of one worker, in order: `arrivals_s` says when they come, or each follows the end of one before it."""

    requests: tuple[SimulatedRequest, ...]
    concurrency: int = 0
    """Closed loop: so many at once."""
    arrivals_s: tuple[float, ...] = ()
    """Open loop: ascending, one for each request."""
    warm_up: int = 0
    """First requests that are not measured."""


@dataclass(slots=True)
class SimulatedTimes:
    """What was seen, beyond the warm-up. Seconds."""

    gaps_s: list[float] = field(default_factory=list)
    gap_rows: list[int] = field(default_factory=list)
    """Rows that waited for that gap."""
    first_token_s: list[float] = field(default_factory=list)
    request_s: list[float] = field(default_factory=list)
    decode_rows: list[int] = field(default_factory=list)
    """Of each plan."""
    prefill_tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    """Held when the plan was built."""
    tokens: int = 0
    busy_s: float = 0.0
    begin_s: float | None = None
    """The first measured request comes."""
    end_s: float | None = None
    """The last request comes: from then on load is not complete."""

    @property
    def is_measuring(self) -> bool:
        """Whether plans count."""
        return self.begin_s is not None and self.end_s is None

    @property
    def seconds(self) -> float:
        """Measured time."""
        return 0.0 if self.begin_s is None or self.end_s is None else self.end_s - self.begin_s


@dataclass(slots=True)
class _Request:
    asked: SimulatedRequest
    number: int
    arrived_s: float
    pages: int
    to_prefill: int
    held_tokens: int


@dataclass(frozen=True, slots=True)
class _Plan:
    end_s: float
    gap_s: float
    busy_s: float
    decode_rows: int
    prefill_tokens: int
    first: tuple[_Request, ...]
    """Their first token comes with it."""
    last: tuple[_Request, ...]
    """Their last one does."""


def simulate(load: SimulatedLoad, worker: WorkerShape, cost: StepCost, *, seed: int = 0) -> SimulatedTimes:
    """What the worker's callers see."""
    return _Life(load, worker, cost, seed=seed).run()


class _Life:
    def __init__(self, load: SimulatedLoad, worker: WorkerShape, cost: StepCost, *, seed: int) -> None:
        self._load, self._worker, self._cost = load, worker, cost
        random = np.random.default_rng(seed)
        self._chance = {prefills: _drawn(cost.deviations(prefills=prefills), random) for prefills in (False, True)}
        self._arrivals = _first_arrivals(load)
        self._waiting: deque[_Request] = deque()
        self._prefilling: list[_Request] = []
        self._in_flight: deque[_Plan] = deque()
        self._ends: dict[int, list[_Request]] = {}
        """Requests by the plan that samples their last token."""
        self._plans, self._decoding, self._context, self._pages = 0, 0, 0, 0
        self._device_free_s = 0.0
        self._times = SimulatedTimes()

    def run(self) -> SimulatedTimes:
        while self._arrivals or self._in_flight:
            next_end_s = self._in_flight[0].end_s if self._in_flight else float("inf")
            if self._arrivals and self._arrivals[0][0] <= next_end_s:
                self._arrive()
            else:
                self._answer()
        return self._times

    def _arrive(self) -> None:
        at_s, number = heapq.heappop(self._arrivals)
        asked = self._load.requests[number]
        pages = -(-asked.total_tokens // self._worker.page_size)
        request = _Request(asked, number, at_s, pages, asked.prompt_tokens, asked.cached_tokens)
        if number == self._load.warm_up:
            self._times.begin_s = at_s
        if number == len(self._load.requests) - 1:
            self._times.end_s = at_s
        self._waiting.append(request)
        self._build(at_s)

    def _answer(self) -> None:
        plan = self._in_flight.popleft()
        if self._times.is_measuring:
            self._measure(plan)
        for request in plan.first:
            if request.number >= self._load.warm_up:
                self._times.first_token_s.append(plan.end_s - request.arrived_s)
        for request in plan.last:
            self._end(request, plan.end_s)
        self._build(plan.end_s)

    def _measure(self, plan: _Plan) -> None:
        times = self._times
        times.decode_rows.append(plan.decode_rows)
        times.prefill_tokens.append(plan.prefill_tokens)
        times.pages.append(self._pages)
        times.tokens += plan.decode_rows + len(plan.first)
        times.busy_s += plan.busy_s
        if plan.decode_rows:
            times.gaps_s.append(plan.gap_s)
            times.gap_rows.append(plan.decode_rows)

    def _end(self, request: _Request, at_s: float) -> None:
        self._pages -= request.pages
        if request.number >= self._load.warm_up:
            self._times.request_s.append(at_s - request.arrived_s)
        follower = request.number + self._load.concurrency
        if self._load.concurrency and follower < len(self._load.requests):
            heapq.heappush(self._arrivals, (at_s + TURNAROUND_S, follower))

    def _build(self, now_s: float) -> None:
        """Plans until the window is full or there is nothing to compute."""
        while len(self._in_flight) < self._worker.window:
            self._admit()
            plan = self._next_plan(now_s)
            if plan is None:
                return
            self._in_flight.append(plan)

    def _admit(self) -> None:
        held = self._decoding + len(self._prefilling)
        while self._waiting and held < self._worker.max_rows:
            pages = self._waiting[0].pages
            if self._worker.num_pages is not None and self._pages + pages > self._worker.num_pages and self._pages:
                return
            self._pages += pages
            self._prefilling.append(self._waiting.popleft())
            held += 1

    def _next_plan(self, now_s: float) -> _Plan | None:
        decode_rows = self._decoding
        prefill_tokens, first = self._prefill(decode_rows)
        if not decode_rows and not prefill_tokens:
            return None
        self._plans += 1
        self._context += decode_rows
        shape = PlanShape(decode_rows, prefill_tokens, self._context)
        step_s = self._cost.step_s(shape) * next(self._chance[prefill_tokens > 0])
        begin_s = max(now_s, self._device_free_s)
        gap_s = begin_s + step_s - self._device_free_s
        self._device_free_s = begin_s + step_s
        last = [*self._ends.pop(self._plans, ()), *(request for request in first if request.asked.output_tokens == 1)]
        self._decoding -= len(last)
        self._context -= sum(request.asked.total_tokens - 1 for request in last)  # nobody reads a last token
        return _Plan(
            self._device_free_s, gap_s, step_s, decode_rows, prefill_tokens, first=tuple(first), last=tuple(last)
        )

    def _prefill(self, decode_rows: int) -> tuple[int, list[_Request]]:
        """Prefill tokens of the next plan, and the requests whose prompt is then computed: they decode from then on."""
        budget = most = min(self._budget(), self._worker.max_tokens - decode_rows)
        done: list[_Request] = []
        for request in self._prefilling:
            taken = request.to_prefill if request.to_prefill <= budget else self._whole_pages(request, budget)
            if taken <= 0:
                break
            budget -= taken
            request.to_prefill -= taken
            request.held_tokens += taken
            self._context += taken
            if not request.to_prefill:
                done.append(request)
        for request in done:
            self._prefilling.remove(request)
            self._decoding += 1
            self._context += request.asked.cached_tokens
            if request.asked.output_tokens > 1:
                self._ends.setdefault(self._plans + request.asked.output_tokens, []).append(request)
        return most - budget, done

    def _whole_pages(self, request: _Request, budget: int) -> int:
        end = (request.held_tokens + budget) // self._worker.page_size * self._worker.page_size
        return end - request.held_tokens

    def _budget(self) -> int:
        worker = self._worker
        if worker.budget_tokens is not None:
            return max(worker.budget_tokens, worker.page_size)
        own = worker.budget
        begin_s = self._cost.step_s(PlanShape(0, 0, self._context))
        token_s = (self._cost.step_s(PlanShape(0, own.most_tokens, self._context)) - begin_s) / own.most_tokens
        fits = (own.target_step_s - begin_s) / token_s if token_s > 0 else own.most_tokens
        return whole_pages(fits, least=own.least_tokens, most=own.most_tokens, page_size=worker.page_size)


def _first_arrivals(load: SimulatedLoad) -> list[tuple[float, int]]:
    """When requests come that follow no other; a heap."""
    if load.concurrency:
        return [(0.0, number) for number in range(min(load.concurrency, len(load.requests)))]
    return list(zip(load.arrivals_s, range(len(load.requests)), strict=True))


def _drawn(values: tuple[float, ...], random: np.random.Generator) -> Iterator[float]:
    while True:
        yield from np.array(values)[random.integers(len(values), size=_DRAWS)].tolist()
