"""How many workers a load needs, and what its callers then see. Pure: simulates each number of workers it tries."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protos.client.bench_workload import Lengths
from protos.client.capacity_costs import StepCost
from protos.client.capacity_simulation import SimulatedLoad, SimulatedRequest, SimulatedTimes, WorkerShape, simulate
from protos.wire.bucket_lists import DECODE_SIZES, PREFILL_SIZES
from protos.wire.buckets import choose_bucket, real_units
from protos.wire.enums import ForwardMode, GraphPhase
from protos.wire.errors import InvalidRequest
from protos.wire.limits import MAX_PLAN_ROWS
from protos.wire.plan import GraphChoice
from protos.wire.worker_info import Buckets

Array = np.ndarray

MAX_WORKERS = 1024
_LEAST_REQUESTS, _MOST_REQUESTS = 64, 4000
_ROUNDS = 12
"""Requests that follow each other on one place of a closed loop."""
_OPEN_S = 120.0
"""Least simulated time of an open loop."""
_WARM_UP_SHARE = 0.1
_PEAK = 99
_KEPT_SHARE = 0.005
"""Buckets that fewer plans choose are not worth their memory."""
_DEFAULT_BUCKETS = tuple(
    Buckets(phase=phase, sizes=sizes, live=sizes, slots=MAX_PLAN_ROWS)
    for phase, sizes in ((GraphPhase.DECODE, DECODE_SIZES), (GraphPhase.PREFILL, PREFILL_SIZES))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What all callers together ask for: either so many requests at once, or so many a second."""

    rate: float | None = None
    concurrency: int | None = None
    prompt: Lengths
    output: Lengths
    cached_ratio: float = 0.0
    """Share of the prompt tokens that a prefix cache holds."""
    headroom_ratio: float = 0.0
    """Further load that must fit as well."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What callers are promised."""

    inter_token_p95_s: float
    first_token_p95_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketUse:
    """One size of the default buckets, by the plans that would choose it."""

    phase: str
    size: int
    share: float
    """Of all plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a number of workers gives. Latencies are the worker's: callers' networks come on top."""

    workers: int
    rows_mean: float
    """Decode rows of a step."""
    rows_peak: float
    """99 of 100 steps have no more."""
    output_tokens_per_s: float
    """Of all workers."""
    utilisation_ratio: float
    """Share of the time in which a worker computes."""
    inter_token_p50_s: float
    inter_token_p95_s: float
    first_token_p50_s: float
    first_token_p95_s: float
    request_p50_s: float
    pages_peak: int
    """KV pages of a worker that requests hold, 99 of 100 steps."""
    buckets: tuple[BucketUse, ...]
    padding_ratio: float
    """Padded over all units of those buckets."""

    def meets(self, targets: Targets) -> bool:
        """Whether callers get what they are promised."""
        return (
            self.inter_token_p95_s <= targets.inter_token_p95_s and self.first_token_p95_s <= targets.first_token_p95_s
        )


def expect(demand: Demand, workers: int, *, worker: WorkerShape, cost: StepCost) -> Expected:
    """What callers see when `workers` share the load evenly.

    Raises:
        InvalidRequest: a request of the load does not fit a worker.
    """
    load = _load_of_one(demand, workers)
    _check_fits(load.requests, worker)
    times = simulate(load, worker, cost, seed=demand.seed)
    gaps = np.repeat(np.array(times.gaps_s), np.array(times.gap_rows, int)) if times.gaps_s else np.zeros(1)
    uses, padding = bucket_use(times)
    inter_token = _percentiles(gaps, 50, 95)
    first_token = _percentiles(np.array(times.first_token_s), 50, 95)
    return Expected(
        workers=workers,
        rows_mean=float(np.mean(times.decode_rows or [0])),
        rows_peak=float(np.percentile(times.decode_rows or [0], _PEAK)),
        output_tokens_per_s=workers * times.tokens / times.seconds if times.seconds else 0.0,
        utilisation_ratio=min(times.busy_s / times.seconds, 1.0) if times.seconds else 0.0,
        inter_token_p50_s=inter_token[0],
        inter_token_p95_s=inter_token[1],
        first_token_p50_s=first_token[0],
        first_token_p95_s=first_token[1],
        request_p50_s=_percentiles(np.array(times.request_s), 50)[0],
        pages_peak=int(np.ceil(np.percentile(times.pages or [0], _PEAK))),
        buckets=uses,
        padding_ratio=padding,
    )


def fewest_workers(demand: Demand, targets: Targets, *, worker: WorkerShape, cost: StepCost) -> Expected:
    """The smallest number of workers that keeps the promises, with what it gives.

    Raises:
        InvalidRequest: no number does: says what one request for itself gets.
    """
    tried: dict[int, Expected] = {}

    def meets(workers: int) -> bool:
        tried[workers] = expect(demand, workers, worker=worker, cost=cost)
        return tried[workers].meets(targets)

    most = MAX_WORKERS if demand.concurrency is None else min(MAX_WORKERS, _with_headroom(demand.concurrency, demand))
    high = 1
    while not meets(high):
        if high >= most:
            raise _cannot_meet(tried[high], targets, demand)
        high = min(2 * high, most)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return tried[high]


def bucket_use(times: SimulatedTimes) -> tuple[tuple[BucketUse, ...], float]:
    """Which default sizes the plans would choose, and the share of padding in them."""
    chosen: Counter[GraphChoice] = Counter()
    real = padded = 0
    for rows, tokens in zip(times.decode_rows, times.prefill_tokens, strict=True):
        mode = ForwardMode.MIXED if tokens else ForwardMode.DECODE
        choice = choose_bucket(_DEFAULT_BUCKETS, mode=mode, num_rows=rows, num_tokens=rows + tokens)
        if isinstance(choice, GraphChoice):
            units = real_units(choice.phase, num_rows=rows, num_tokens=rows + tokens)
            chosen[choice] += 1
            real, padded = real + units, padded + choice.bucket - units
    plans = max(len(times.decode_rows), 1)
    uses = tuple(
        BucketUse(phase=choice.phase.name.lower(), size=choice.bucket, share=count / plans)
        for choice, count in sorted(chosen.items(), key=lambda item: (item[0].phase, item[0].bucket))
        if count / plans >= _KEPT_SHARE
    )
    return uses, padded / max(real + padded, 1)


def _load_of_one(demand: Demand, workers: int) -> SimulatedLoad:
    """One worker's even share of the load."""
    if demand.concurrency is not None:
        places = max(-(-_with_headroom(demand.concurrency, demand) // workers), 1)
        count = min(max(_ROUNDS * places, _LEAST_REQUESTS), max(_MOST_REQUESTS, 3 * places))
        return SimulatedLoad(requests=_requests(demand, count), concurrency=places, warm_up=places)
    assert demand.rate is not None
    rate = demand.rate * (1 + demand.headroom_ratio) / workers
    count = int(min(max(rate * _OPEN_S, _LEAST_REQUESTS), _MOST_REQUESTS))
    gaps = np.random.default_rng((demand.seed, 1)).exponential(1 / rate, size=count)
    arrivals = tuple(float(at) for at in np.cumsum(gaps))
    return SimulatedLoad(requests=_requests(demand, count), arrivals_s=arrivals, warm_up=int(count * _WARM_UP_SHARE))


def _with_headroom(concurrency: int, demand: Demand) -> int:
    return int(np.ceil(concurrency * (1 + demand.headroom_ratio)))


def _requests(demand: Demand, count: int) -> tuple[SimulatedRequest, ...]:
    random = np.random.default_rng(demand.seed)
    drawn = [(demand.prompt.draw(random), demand.output.draw(random)) for _ in range(count)]
    cached = [min(int(prompt * demand.cached_ratio), prompt - 1) for prompt, _ in drawn]
    return tuple(
        SimulatedRequest(prompt_tokens=prompt - hit, cached_tokens=hit, output_tokens=output)
        for (prompt, output), hit in zip(drawn, cached, strict=True)
    )


def _check_fits(requests: Sequence[SimulatedRequest], worker: WorkerShape) -> None:
    longest = max(request.total_tokens for request in requests)
    room = None if worker.num_pages is None else worker.num_pages * worker.page_size
    if room is not None and longest > room:
        message = f"a request of {longest} tokens does not fit a worker's {worker.num_pages} pages ({room} tokens)"
        raise InvalidRequest(message, field="num_pages")


def _cannot_meet(found: Expected, targets: Targets, demand: Demand) -> InvalidRequest:
    """The error that says what is possible, and which target asks for more."""
    if found.inter_token_p95_s > targets.inter_token_p95_s:
        field, value, limit = "inter_token_ms", found.inter_token_p95_s * 1e3, targets.inter_token_p95_s * 1e3
    else:
        field, value, limit = "first_token_ms", found.first_token_p95_s * 1e3, targets.first_token_p95_s * 1e3
    load = f"{demand.rate:g} requests/s" if demand.rate is not None else f"{demand.concurrency} requests at once"
    given = f"{found.workers} workers still give a 95th percentile of {value:.1f}"
    message = f"{field} {limit:g} cannot be kept for {load}: {given}"
    return InvalidRequest(message, field=field)


def _percentiles(values: Array, *ranks: int) -> list[float]:
    return [float(value) for value in np.percentile(values, ranks)] if len(values) else [0.0] * len(ranks)
