"""Which stage of its life the worker is in, told to health probes and to reports. Lives in one event loop."""

import asyncio

from protos.service.server import HealthServer
from protos.wire.enums import WorkerState

SERVICE_NAME = "forwardplane.v1.WorkerService"

_READY = frozenset({WorkerState.CAPTURING, WorkerState.SERVING})


class WorkerStatus:
    """One per process. States only move forward, except between CAPTURING and SERVING."""

    def __init__(self, health: HealthServer) -> None:
        self.state = WorkerState.LOADING
        self.is_leaving = asyncio.Event()
        """Set: streams that would never end by themselves end now."""
        self._health = health

    async def set(self, state: WorkerState) -> None:
        """Move on and tell the probes. A failed worker stays failed."""
        if self.state is WorkerState.FAILED:
            return
        self.state = state
        await self._health.set_serving(SERVICE_NAME, is_serving=state in _READY)

    async def drain(self) -> None:
        """The worker is about to leave, or was told so."""
        await self.set(WorkerState.DRAINING)
