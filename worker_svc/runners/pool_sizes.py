"""Settings and free memory -> the sizes of a device side's KV sub-pools, for either stack, and a line in the log."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from worker_svc.device.memory import free_bytes, own_bytes
from worker_svc.kv.canary_table import canary_bytes
from worker_svc.kv.sizing import CapacityRequest, FreeMemory, SubPoolNeed, plan_capacity, useful_pages
from worker_svc.kv.token_to_kv_pool import KVGeometry
from worker_svc.runners.executor_settings import ExecutorSettings

logger = logging.getLogger(__name__)

DEFAULT_FRACTIONS = {"cuda": 0.9}
"""Of devices that nobody shares. Elsewhere the pools take a quarter of what the weights leave."""
PLANS_IN_FLIGHT = 2
"""Whose chunks a row may hold beyond its window."""


class PoolSizes:
    """Sizes the sub-pools of one worker. Made before its weights are loaded, asked once they are there."""

    def __init__(self, settings: ExecutorSettings) -> None:
        self._settings = settings
        self._device = torch.device(settings.device)
        self._free_before = free_bytes(self._device)
        self._own_before = own_bytes(self._device)

    def sized(
        self,
        sizeless: Sequence[KVGeometry],
        *,
        context_tokens: int,
        graph_bytes: int = 0,
    ) -> tuple[KVGeometry, ...]:
        """The sub-pools with their numbers of pages, from what is free now.

        Args:
            sizeless: geometries without one; the full sub-pool first.
            context_tokens: the longest sequence.
            graph_bytes: what captured graphs will take.

        Raises:
            InvalidRequest: the setting cannot be had; says what works.
        """
        settings = self._settings
        loaded = max(0, own_bytes(self._device) - self._own_before)
        memory = FreeMemory(before_load=self._free_before, after_load=free_bytes(self._device), loaded=loaded)
        request = CapacityRequest(
            kv_bytes=settings.kv_bytes,
            num_pages=settings.num_pages,
            memory_fraction=_fraction(settings),
            ranks=(memory,),
            graph_bytes=graph_bytes,
            sub_pools=tuple(
                _need(geometry, settings, most_tokens=_most_tokens(geometry.window_tokens, settings, context_tokens))
                for geometry in sizeless
            ),
        )
        pages = plan_capacity(request)
        extra = {"pages": list(pages), "free_before_bytes": memory.before_load, "free_after_bytes": memory.after_load}
        logger.info("kv pools", extra={**extra, "graph_bytes": graph_bytes})
        return tuple(replace(geometry, num_pages=count) for geometry, count in zip(sizeless, pages, strict=True))


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
