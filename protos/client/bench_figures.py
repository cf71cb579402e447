"""From records to figures: percentiles, throughput, refusals. Pure.

Measured requests are those after the warm-up. Time to first token counts from the moment a request was due, so a client
or server that falls behind cannot hide it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protos.client.bench_records import Outcome, RequestRecord

Array = np.ndarray

PERCENTILES = (50, 90, 95, 99)
_LEAST_STEADY_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of one measured quantity, in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """None: nothing of the kind was measured."""

    first_token_s: Distribution | None
    """From when the request was due to its first token."""
    inter_token_s: Distribution | None
    """Gap between tokens; a chunk of n tokens counts as n gaps of an n-th each."""
    chunk_gap_s: Distribution | None
    """Gap between chunks: the longest a reader waited."""
    token_mean_s: Distribution | None
    """Per request: (last token - first token) / (tokens - 1)."""
    request_s: Distribution | None
    """From when the request was due to its end."""
    late_s: Distribution | None
    """How late the client itself sent requests; large: the client is the bottleneck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Over the measured time: first measured request sent to last one ended."""

    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    steady_output_tokens_per_s: float | None
    """Between the first and the last measured request sent, while load was complete; None when that was short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFigures:
    """One run."""

    measured: int
    warm_up: int
    outcomes: dict[str, int]
    """Measured requests by outcome."""
    reasons: dict[str, int]
    """Measured requests by finish reason or error."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    wrong: int
    """Requests, warm-up included, whose tokens are not the simulated model's."""
    latencies: Latencies
    throughput: Throughput | None


def bench_figures(records: Sequence[RequestRecord], *, warm_up: int) -> BenchFigures:
    """What `records` add up to; requests below number `warm_up` are left out."""
    measured = [record for record in records if record.number >= warm_up]
    done = [record for record in measured if record.outcome is Outcome.DONE]
    return BenchFigures(
        measured=len(measured),
        warm_up=len(records) - len(measured),
        outcomes=dict(Counter(record.outcome.value for record in measured)),
        reasons=dict(Counter(record.reason for record in measured)),
        prompt_tokens=sum(record.prompt_tokens for record in measured),
        cached_tokens=sum(record.cached_tokens for record in measured),
        output_tokens=sum(record.output_tokens for record in measured),
        wrong=sum(record.is_wrong for record in records),
        latencies=_latencies(measured, done),
        throughput=_throughput(records, measured),
    )


def distribution(values: Array) -> Distribution | None:
    """Mean, percentiles (linear between neighbours) and maximum; None of nothing."""
    if not len(values):
        return None
    p50, p90, p95, p99 = (float(value) for value in np.percentile(values, PERCENTILES))
    return Distribution(
        count=len(values),
        mean=float(values.mean()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(values.max()),
    )


def inter_token_gaps(record: RequestRecord) -> Array:
    """[tokens after the first chunk] seconds."""
    times, tokens = np.array(record.chunk_times_s), np.array(record.chunk_tokens, np.int64)
    gaps: Array = np.repeat(np.diff(times) / tokens[1:], tokens[1:])
    return gaps


def tokens_between(records: Sequence[RequestRecord], begin_s: float, end_s: float) -> int:
    """Tokens that arrived in [begin_s, end_s)."""
    total = 0
    for record in records:
        times = np.array(record.chunk_times_s)
        total += int(np.array(record.chunk_tokens, np.int64)[(times >= begin_s) & (times < end_s)].sum())
    return total


def _latencies(measured: list[RequestRecord], done: list[RequestRecord]) -> Latencies:
    started = [record for record in measured if record.chunk_tokens]
    return Latencies(
        first_token_s=distribution(np.array([record.chunk_times_s[0] - record.due_s for record in started])),
        inter_token_s=distribution(_joined([inter_token_gaps(record) for record in started])),
        chunk_gap_s=distribution(_joined([np.diff(np.array(record.chunk_times_s)) for record in started])),
        token_mean_s=distribution(np.array([_token_mean_s(record) for record in done if len(record.chunk_tokens) > 1])),
        request_s=distribution(np.array([record.end_s - record.due_s for record in done])),
        late_s=distribution(np.array([record.sent_s - record.due_s for record in measured])),
    )


def _token_mean_s(record: RequestRecord) -> float:
    """The first chunk's tokens arrived together: the rest came in the time since then."""
    return (record.chunk_times_s[-1] - record.chunk_times_s[0]) / (record.output_tokens - record.chunk_tokens[0])


def _throughput(records: Sequence[RequestRecord], measured: list[RequestRecord]) -> Throughput | None:
    if not measured:
        return None
    begin_s = min(record.sent_s for record in measured)
    end_s = max(record.end_s for record in measured)
    seconds = end_s - begin_s
    if seconds <= 0:
        return None
    last_sent_s = max(record.sent_s for record in measured)
    is_steady = last_sent_s - begin_s >= _LEAST_STEADY_SHARE * seconds
    steady = tokens_between(records, begin_s, last_sent_s) / (last_sent_s - begin_s) if is_steady else None
    return Throughput(
        seconds=seconds,
        requests_per_s=sum(record.outcome is Outcome.DONE for record in measured) / seconds,
        output_tokens_per_s=sum(record.output_tokens for record in measured) / seconds,
        prompt_tokens_per_s=sum(record.prompt_tokens for record in measured) / seconds,
        steady_output_tokens_per_s=steady,
    )


def _joined(parts: list[Array]) -> Array:
    return np.concatenate([np.zeros(0), *parts])
