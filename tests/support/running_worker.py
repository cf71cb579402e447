"""A worker's service that runs in this process while a block runs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from protos.service.lifecycle import ExitCode
from worker_svc.rpc.service import WorkerService


@contextlib.asynccontextmanager
async def running_service(service: WorkerService) -> AsyncIterator[asyncio.Task[ExitCode]]:
    """It listens when the block begins, and is stopped behind it: the task then has the exit code."""
    running = asyncio.create_task(service.run())
    while not service.listeners.port:
        await asyncio.sleep(0.005)
    try:
        yield running
    finally:
        service.lifecycle.request_stop("test")
        await running
