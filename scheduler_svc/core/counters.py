"""Figures the shell exports as metrics: counters that only grow, and a snapshot of gauges."""

from dataclasses import dataclass, field
from enum import StrEnum

from protos.wire.enums import FinishReason


class MigrationCause(StrEnum):
    """Why a request lost its worker."""

    WORKER_DIED = "worker_died"
    """Its process or device is gone."""
    DRAIN = "drain"
    """It was told to leave."""
    WORKER_LOST = "worker_lost"
    """It does not answer, or answered what ends a term."""


@dataclass(slots=True, kw_only=True)
class CacheCounters:
    """Of the prefix caches of all workers."""

    queried_tokens: int = 0
    """Known tokens of requests when they were placed, again after a retraction or migration."""
    hit_tokens: int = 0
    """Of these, found in the cache."""
    prompt_tokens: int = 0
    """Of these, in prompts, when their request was first placed: the sum of the `cached_tokens` of all usages."""
    evicted_pages: int = 0
    """Of workers that were lost; attached ones count in their gauges."""


@dataclass(slots=True, kw_only=True)
class CoreCounters:
    """Since the process started."""

    plans: int = 0
    rows: int = 0
    prefill_tokens: int = 0
    """Planned in extend rows, re-prefills included."""
    decode_tokens: int = 0
    """Planned in decode rows."""
    prompt_tokens: int = 0
    """Of accepted requests."""
    output_tokens: int = 0
    """Released to streams."""
    retractions: int = 0
    """Requests that gave their pages back for lack of pages."""
    migrations_by_cause: dict[MigrationCause, int] = field(default_factory=lambda: dict.fromkeys(MigrationCause, 0))
    """Requests that lost their worker."""
    strikes: int = 0
    """Workers that died with plans in flight."""
    failed_rows: int = 0
    """Rows of the current attempt that failed or whose answer did not match."""
    rejected_plans: int = 0
    late_rows: int = 0
    """Rows whose request had ended or moved on before their result: wasted work."""
    late_results: int = 0
    """Whole results of a term or seq that was not expected."""
    cache: CacheCounters = field(default_factory=CacheCounters)
    refused: dict[str, int] = field(default_factory=dict)
    """By reason of the error taxonomy."""
    finished: dict[FinishReason, int] = field(default_factory=dict)

    @property
    def migrations(self) -> int:
        """Requests that lost their worker, whatever the cause."""
        return sum(self.migrations_by_cause.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGauges:
    """One attached worker."""

    worker: str
    requests: int
    plans_in_flight: int
    pages: tuple[int, ...]
    """Usable pages per sub-pool."""
    pages_used: tuple[int, ...]
    """Of these, the ones that requests hold."""
    pages_cached: tuple[int, ...]
    """Of the others, those in the prefix cache: free for whoever needs them."""
    evicted_pages: int
    """Cached pages given up since the worker was attached."""
    budget_tokens: int
    """Prefill tokens a plan may carry."""
    prediction_error: float
    """Mean relative error of the cost model, recently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreGauges:
    """Now."""

    running: int
    waiting: int
    waiting_tokens: int
    new_token_ratio: float
    workers: tuple[WorkerGauges, ...]
