"""Memory -> whole pages of every KV sub-pool, and how many requests may run in them. Pure; knows no device.

    granted = free after the weights - free before them x (1 - memory_fraction) - graphs, the least of all ranks
    pages   = whole pages of `granted`, shared out between the sub-pools, none beyond what is of use

Guards: a sub-pool that is granted holds its sink and at least one page, all together take no more than was granted, and
a refusal says the smallest setting that works.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from protos.wire.errors import InvalidRequest

MIN_PAGES = 2
"""The sink and one page."""
DEFAULT_MEMORY_SHARE = 0.25
"""Of the memory free after weights and graphs, where neither a size nor a fraction is asked for."""
WINDOW_SHARE = 0.8
"""Pages of a window sub-pool for each page of the full one: a sequence holds few of them, cached prefixes hold more."""
MIN_RUNNING, MAX_RUNNING = 2048, 4096
RUNNING_PER_FULL_CONTEXT = 512
"""Requests for each sequence of full context that fits: most sequences are short."""
_FRACTION_DIGITS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """Of one rank, in bytes."""

    before_load: int
    """Free when the process began to load the weights."""
    after_load: int
    """Free with the weights there and nothing else."""
    loaded: int
    """What the load made this process hold; others may have taken or given memory meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubPoolNeed:
    """One sub-pool: the full one first, window ones behind it."""

    bytes_per_page: int
    """With everything that is kept beside a page."""
    useful_pages: int
    """Pages beyond which the worker's row and context limits leave nothing to gain; the sink counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRequest:
    """What the settings ask for, and what there is. At most one of the three sizes; none: a quarter of what is left."""

    kv_bytes: int | None = None
    """Of all sub-pools."""
    num_pages: int | None = None
    """Of the full sub-pool, the sink included."""
    memory_fraction: float | None = None
    """Of the memory free before the load: what weights, graphs and pools may take together."""
    ranks: tuple[FreeMemory, ...]
    graph_bytes: int = 0
    """What captured graphs will take."""
    sub_pools: tuple[SubPoolNeed, ...]


def plan_capacity(request: CapacityRequest) -> tuple[int, ...]:
    """Pages of each sub-pool, its sink included; every rank gets the same.

    Raises:
        InvalidRequest: the setting is too small, or larger than the free memory; says what works.
    """
    given = [name for name in ("kv_bytes", "num_pages", "memory_fraction") if getattr(request, name) is not None]
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} exclude each other: give one", field=given[0])
    if request.num_pages is not None:
        return _asked_pages(request, request.num_pages)
    if request.kv_bytes is not None:
        return _asked_bytes(request, request.kv_bytes)
    if request.memory_fraction is not None:
        return _asked_fraction(request, request.memory_fraction)
    return _default_share(request)


def running_limit(*, capacity_tokens: int, context_tokens: int, asked: int) -> int:
    """Most requests that may run at once: two tokens each at least, and no more than `asked`."""
    formula = capacity_tokens * RUNNING_PER_FULL_CONTEXT // context_tokens
    return max(1, min(asked, max(MIN_RUNNING, min(formula, MAX_RUNNING)), capacity_tokens // 2))


def useful_pages(*, max_rows: int, most_tokens: int, page_size: int) -> int:
    """Pages, the sink included, that `max_rows` sequences of `most_tokens` held tokens fill."""
    return 1 + max_rows * -(-most_tokens // page_size)


def window_pages(full_pages: int) -> int:
    """Pages of a window sub-pool beside a full one of `full_pages`, the sink of each included."""
    return max(MIN_PAGES, int(full_pages * WINDOW_SHARE))


def shared_out(granted_bytes: int, sub_pools: Sequence[SubPoolNeed]) -> tuple[int, ...]:
    """Whole pages of each sub-pool within `granted_bytes`, which hold two pages of each at least."""
    full, *windowed = sub_pools
    weight = full.bytes_per_page + WINDOW_SHARE * sum(need.bytes_per_page for need in windowed)
    asked = window_pages(int(granted_bytes / weight))
    counts = [min(asked, max(need.useful_pages, MIN_PAGES)) for need in windowed]
    left = granted_bytes - _total(counts, windowed)
    while windowed and left < MIN_PAGES * full.bytes_per_page:
        counts = [max(MIN_PAGES, count - 1) for count in counts]
        left = granted_bytes - _total(counts, windowed)
    return (min(left // full.bytes_per_page, max(full.useful_pages, MIN_PAGES)), *counts)


def _asked_pages(request: CapacityRequest, pages: int) -> tuple[int, ...]:
    if pages < MIN_PAGES:
        raise InvalidRequest(f"num_pages is {pages}, the smallest that works is {MIN_PAGES}", field="num_pages")
    counts = (pages, *(window_pages(pages) for _ in request.sub_pools[1:]))
    if _total(counts, request.sub_pools) > _free(request):
        most = shared_out(max(_free(request), _least(request)), _boundless(request.sub_pools))[0]
        raise InvalidRequest(f"num_pages is {pages}, the free memory allows at most {most}", field="num_pages")
    return counts


def _asked_bytes(request: CapacityRequest, kv_bytes: int) -> tuple[int, ...]:
    if kv_bytes < _least(request):
        message = f"kv_bytes is {kv_bytes}, the smallest that works is {_least(request)}"
        raise InvalidRequest(message, field="kv_bytes")
    if kv_bytes > _free(request):
        message = f"kv_bytes is {kv_bytes}, the free memory allows at most {_free(request)}"
        raise InvalidRequest(message, field="kv_bytes")
    return shared_out(kv_bytes, _boundless(request.sub_pools))


def _asked_fraction(request: CapacityRequest, fraction: float) -> tuple[int, ...]:
    left = [
        rank.after_load - math.ceil(rank.before_load * (1 - fraction)) - request.graph_bytes for rank in request.ranks
    ]
    if min(left) < _least(request):
        raise InvalidRequest(_fraction_problem(request, fraction), field="memory_fraction")
    return shared_out(min(left), request.sub_pools)


def _fraction_problem(request: CapacityRequest, fraction: float) -> str:
    """Says what a new start needs, which finds free what is free now and what this process holds."""
    needed = request.graph_bytes + _least(request)
    scale = 10**_FRACTION_DIGITS
    tightest = max(request.ranks, key=lambda rank: (rank.loaded + needed) / (rank.loaded + rank.after_load))
    free, taken = tightest.loaded + tightest.after_load, tightest.loaded + needed
    least = math.ceil(scale * taken / free)
    if least > scale:
        graphs = f" (graphs {request.graph_bytes}, by graph_memory_file or estimated)" if request.graph_bytes else ""
        return f"{free} bytes are free, weights, graphs and the smallest pools need {taken}{graphs}"
    message = f"memory_fraction is {fraction}, the smallest that works is {least / scale}"
    if least <= scale * fraction:
        others = max(rank.before_load - rank.after_load - rank.loaded for rank in request.ranks)
        message += f" once others hold still: they took {others} bytes while the weights were loaded; start again"
    return message


def _default_share(request: CapacityRequest) -> tuple[int, ...]:
    share = int(_free(request) * DEFAULT_MEMORY_SHARE)
    if share < _least(request):
        needed = math.ceil(_least(request) / DEFAULT_MEMORY_SHARE)
        message = f"free memory is {_free(request)} bytes; the KV pools take a quarter and need {needed} to be free"
        raise InvalidRequest(message, field="kv_bytes")
    return shared_out(share, request.sub_pools)


def _free(request: CapacityRequest) -> int:
    return min(rank.after_load for rank in request.ranks) - request.graph_bytes


def _least(request: CapacityRequest) -> int:
    return MIN_PAGES * sum(need.bytes_per_page for need in request.sub_pools)


def _total(counts: Sequence[int], sub_pools: Sequence[SubPoolNeed]) -> int:
    return sum(count * need.bytes_per_page for count, need in zip(counts, sub_pools, strict=True))


def _boundless(sub_pools: Sequence[SubPoolNeed]) -> tuple[SubPoolNeed, ...]:
    """Who names a size gets it, useful or not."""
    most = 2**62
    return tuple(SubPoolNeed(bytes_per_page=need.bytes_per_page, useful_pages=most) for need in sub_pools)
