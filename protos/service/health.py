"""The stock health servicer with one fault removed: watchers of one name do not lose each other's updates.

In grpcio-health-checking 1.85 the first watcher of a name that leaves takes the others' condition with it, and they
hear nothing more. Can go when the package's own `Watch` passes the test of this in tests/contract.
"""

import asyncio
from typing import Any

from grpc_health.v1 import health, health_pb2
from typing_extensions import override

STATES = health_pb2.HealthCheckResponse


class HealthServicer(health.aio.HealthServicer):
    """Health by service name. Lives in one event loop."""

    _server_status: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Condition()
        self._changes = 0

    @override
    async def Watch(self, request: Any, context: Any) -> None:
        """Send the state now and after every change, until the caller leaves; a slow caller holds up nobody."""
        last, seen = None, -1
        while True:
            seen = await self._change_after(seen)
            status = self._server_status.get(request.service, STATES.SERVICE_UNKNOWN)
            if status != last:
                await context.write(STATES(status=status))
            last = status

    async def _change_after(self, seen: int) -> int:
        async with self._changed:
            await self._changed.wait_for(lambda: self._changes != seen)
        return self._changes

    async def _set(self, service: str, status: Any) -> None:
        self._server_status[service] = status
        self._changes += 1
        async with self._changed:
            self._changed.notify_all()
