"""Settings and free memory -> the sizes of a device side's KV sub-pools, for either stack, and a line in the log."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from protos.wire.enums import GraphPhase
from worker_svc.device.graph_memory import GraphMemoryStore, graph_fingerprint
from worker_svc.kv.canary_table import canary_bytes
from worker_svc.kv.sizing import CapacityRequest, FreeMemory, SubPoolNeed, plan_capacity, useful_pages
from worker_svc.kv.token_to_kv_pool import KVGeometry
from worker_svc.runners.executor_settings import ExecutorSettings

logger = logging.getLogger(__name__)

DEFAULT_FRACTIONS = {"cuda": 0.9}
"""Of devices that nobody shares. Elsewhere the pools take a quarter of what the weights leave."""
_NOT_OF_MEMORY = ("capture_wait_s", "graph_memory_file")
PLANS_IN_FLIGHT = 2
"""Whose chunks a row may hold beyond its window."""


def sized(
    sizeless: Sequence[KVGeometry],
    *,
    settings: ExecutorSettings,
    memory: FreeMemory,
    context_tokens: int,
    graph_bytes: int = 0,
    windows: Sequence[int] = (0,),
) -> tuple[KVGeometry, ...]:
    """The sub-pools with their numbers of pages.

    Args:
        sizeless: geometries without one; the full sub-pool first.
        settings: what was asked for.
        memory: of this rank, the only one of the worker.
        context_tokens: the longest sequence.
        graph_bytes: what captured graphs will take.
        windows: of each sub-pool, in tokens; 0 = full.

    Raises:
        InvalidRequest: the setting cannot be had; says what works.
    """
    request = CapacityRequest(
        kv_bytes=settings.kv_bytes,
        num_pages=settings.num_pages,
        memory_fraction=_fraction(settings),
        ranks=(memory,),
        graph_bytes=graph_bytes,
        sub_pools=tuple(
            _need(geometry, settings, most_tokens=_most_tokens(window, settings, context_tokens))
            for geometry, window in zip(sizeless, windows, strict=True)
        ),
    )
    pages = plan_capacity(request)
    extra = {"pages": list(pages), "free_before_bytes": memory.before_load, "free_after_bytes": memory.after_load}
    logger.info("kv pools", extra={**extra, "graph_bytes": graph_bytes})
    return tuple(replace(geometry, num_pages=count) for geometry, count in zip(sizeless, pages, strict=True))


def known_graph_bytes(settings: ExecutorSettings, **facts: object) -> int:
    """What graphs took at the last start of a worker like this one; 0 without a measurement."""
    file = settings.graphs.graph_memory_file
    if file is None or settings.graphs.graph == "off":
        return 0
    return sum(GraphMemoryStore(Path(file)).read(fingerprint_of(settings, **facts)).values())


def remember_graph_bytes(settings: ExecutorSettings, measured: Mapping[GraphPhase, int], **facts: object) -> None:
    """Keep what graphs took, for the next start of a worker like this one."""
    file = settings.graphs.graph_memory_file
    if file is not None:
        GraphMemoryStore(Path(file)).write(fingerprint_of(settings, **facts), measured)


def fingerprint_of(settings: ExecutorSettings, **facts: object) -> str:
    """Of everything that the memory of this worker's graphs depends on; `facts` name the model."""
    kept = ("numerics", "dtype", "device", "kernels", "page_size", "max_rows", "max_tokens")
    graphs = {name: value for name, value in asdict(settings.graphs).items() if name not in _NOT_OF_MEMORY}
    return graph_fingerprint(**{name: getattr(settings, name) for name in kept}, **graphs, **facts)


def _fraction(settings: ExecutorSettings) -> float | None:
    if settings.kv_bytes is not None or settings.num_pages is not None:
        return settings.memory_fraction
    return settings.memory_fraction or DEFAULT_FRACTIONS.get(settings.device.partition(":")[0])


def _need(geometry: KVGeometry, settings: ExecutorSettings, *, most_tokens: int) -> SubPoolNeed:
    shadow = 0 if settings.kv_canary == "off" else canary_bytes(geometry.page_size)
    return SubPoolNeed(
        bytes_per_page=geometry.bytes_per_page + shadow,
        useful_pages=useful_pages(max_rows=settings.max_rows, most_tokens=most_tokens, page_size=geometry.page_size),
    )


def _most_tokens(window: int, settings: ExecutorSettings, context_tokens: int) -> int:
    """What one sequence can hold in the sub-pool: its context, or its window with what its plans write past it."""
    if not window:
        return context_tokens
    return min(context_tokens, window + PLANS_IN_FLIGHT * settings.max_tokens + 2 * settings.page_size)
