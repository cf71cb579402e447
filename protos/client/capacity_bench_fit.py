"""A linear cost from figures of `forwardplane bench`: closed loops of several concurrencies. Pure.

The median time between tokens by rows gives the price of decoding; the price of a prompt token is the one with which
the simulated life gives the measured throughput.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import log

import numpy as np

from protos.client.capacity_costs import FIELD, FittedCost, LinearCost, non_negative_solution
from protos.client.capacity_simulation import SimulatedLoad, SimulatedRequest, WorkerShape, simulate
from protos.client.capacity_sources import BenchRun
from protos.wire.errors import InvalidRequest

_HALVINGS = 18
_ROUNDS = 12


def fit_bench_runs(runs: Sequence[BenchRun], worker: WorkerShape) -> FittedCost:
    """The cost that explains the runs best.

    Raises:
        InvalidRequest: all of one concurrency.
    """
    if len({run.rows for run in runs}) < 2:
        message = (
            f"{len(runs)} figures of one concurrency ({runs[0].rows:g} requests a worker): a fit needs two or more"
        )
        raise InvalidRequest(message, field=FIELD)
    gaps = np.array([run.latencies.inter_token_s.p50 for run in runs])
    features = np.array([[1.0, run.rows] for run in runs])
    base, row = (float(price) for price in non_negative_solution(features / gaps[:, None], np.ones(len(runs))))
    cost = LinearCost(base_s=base, decode_row_s=row, prefill_token_s=0.0, context_token_s=0.0)
    fitted = replace(cost, prefill_token_s=_prefill_price(runs, cost, worker))
    errors = [abs(log(_tokens_per_s(run, fitted, worker) / run.tokens_per_s)) for run in runs]
    return FittedCost(fitted, sum(run.measured for run in runs), float(np.median(errors)))


def _prefill_price(runs: Sequence[BenchRun], cost: LinearCost, worker: WorkerShape) -> float:
    """Where simulated throughput is neither above nor below the measured on the whole: it falls with the price."""
    low, high = 0.0, cost.base_s + cost.decode_row_s
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        tried = replace(cost, prefill_token_s=middle)
        above = sum(log(_tokens_per_s(run, tried, worker) / run.tokens_per_s) for run in runs)
        low, high = (middle, high) if above > 0 else (low, middle)
    return (low + high) / 2


def _tokens_per_s(run: BenchRun, cost: LinearCost, worker: WorkerShape) -> float:
    times = simulate(_load(run), worker, cost)
    return times.tokens / times.seconds


def _load(run: BenchRun) -> SimulatedLoad:
    """Requests of the run's mean lengths."""
    concurrency = max(round(run.rows), 1)
    cached = run.cached_tokens // run.measured
    request = SimulatedRequest(
        prompt_tokens=max(run.prompt_tokens // run.measured - cached, 1),
        cached_tokens=cached,
        output_tokens=max(run.output_tokens // run.measured, 1),
    )
    count = (_ROUNDS + 1) * concurrency + 1
    return SimulatedLoad(requests=(request,) * count, concurrency=concurrency, warm_up=concurrency)
