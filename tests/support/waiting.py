"""Waiting for something that happens beside the test, on its event loop."""

import asyncio
from collections.abc import Callable

_PAUSE_S = 0.002


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Return once `condition()` holds.

    Raises:
        TimeoutError: it did not within that time.
    """
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(_PAUSE_S)
