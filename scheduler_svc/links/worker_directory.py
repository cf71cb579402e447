"""Which workers are known: one running link for each. Follows a source of addresses where there is one.

Knows nothing of what a link does. Guards: a worker's link stays as long as it is attached, whatever the source says:
a pod that is going finishes its streams, and a source that errs takes no worker away.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from protos.wire.errors import EngineError, UnavailableError
from scheduler_svc.links.worker_link import WorkerLink

_logger = logging.getLogger(__name__)

Lookup = Callable[[], Awaitable[Collection[str]]]


class Work(Protocol):
    """Work that runs beside the caller."""

    async def start(self) -> None:
        """Begin."""
        ...

    async def stop(self) -> None:
        """End, and wait for the end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryParts:
    """What the composition root gives."""

    make: Callable[[str], WorkerLink]
    run: Callable[[WorkerLink], Work]
    forget: Callable[[str], None]
    """Told of each worker that is no longer known."""


class WorkerDirectory:
    """Made by the core's composition root; `links` is read by the loop and changed between its turns only."""

    def __init__(self, parts: DirectoryParts) -> None:
        self.links: dict[str, WorkerLink] = {}
        self._parts = parts
        self._running: dict[str, Work] = {}
        self._last_error = ""

    async def set(self, workers: Collection[str]) -> None:
        """Know these workers: new ones get a link, those that left lose theirs once it is not attached."""
        for worker in sorted(set(workers) - set(self.links)):
            _logger.info("worker found", extra={"worker": worker})
            link = self.links[worker] = self._parts.make(worker)
            work = self._running[worker] = self._parts.run(link)
            await work.start()
        for worker in sorted(set(self.links) - set(workers)):
            if self.links[worker].info is None:
                _logger.info("worker left", extra={"worker": worker})
                await self._drop(worker)

    async def follow(self, lookup: Lookup, *, interval_s: float) -> None:
        """Ask `lookup` again and again until cancelled. While it fails, what is known stays."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.set(await lookup())
                self._last_error = ""
            except EngineError as error:
                self._lookup_failed(error)

    async def begin(self, lookup: Lookup) -> None:
        """Ask `lookup` for the first time. One that cannot be reached now is asked again by `follow`.

        Raises:
            EngineError: an operator must act.
        """
        try:
            await self.set(await lookup())
        except UnavailableError as error:
            self._lookup_failed(error)

    async def close(self) -> None:
        """End every link."""
        for worker in list(self.links):
            await self._drop(worker)

    async def _drop(self, worker: str) -> None:
        await self._running.pop(worker).stop()
        del self.links[worker]
        self._parts.forget(worker)

    def _lookup_failed(self, error: EngineError) -> None:
        if error.message != self._last_error:
            self._last_error = error.message
            extra = {"workers": len(self.links), "error": error.message}
            _logger.warning("workers cannot be looked up, keeping those known", extra=extra)
