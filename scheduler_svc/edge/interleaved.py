"""Several asynchronous generators as one: items as they come, in order within each.

Knows nothing of what the items are. Guards: whatever ends it, all of them are closed.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

from protos.wire.errors import EngineError

ItemT = TypeVar("ItemT")

_GRACE_S = 0.5
"""What ends one source often ends the others a moment later: they may still give what they have."""


async def interleaved(sources: Sequence[AsyncGenerator[ItemT, None]]) -> AsyncGenerator[ItemT, None]:
    """Items of all sources until all have ended, or soon after one has failed.

    Raises:
        EngineError: the first failure.
    """
    waiting = {asyncio.ensure_future(anext(source)): source for source in sources}
    failures: list[EngineError] = []
    try:
        while waiting:
            patience_s = _GRACE_S if failures else None
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=patience_s)
            if not done:
                break
            for source, item in _given([(waiting.pop(task), task) for task in done], failures):
                yield item
                waiting[asyncio.ensure_future(anext(source))] = source
    finally:
        await _close(list(waiting), sources)
    if failures:
        raise failures[0]


def _given(
    done: "list[tuple[AsyncGenerator[ItemT, None], asyncio.Future[ItemT]]]", failures: list[EngineError]
) -> list[tuple[AsyncGenerator[ItemT, None], ItemT]]:
    """Sources that gave an item; failures of others are kept."""
    given = []
    for source, task in done:
        try:
            given.append((source, task.result()))
        except StopAsyncIteration:
            continue
        except EngineError as error:
            failures.append(error)
    return given


async def _close(tasks: "Sequence[asyncio.Future[ItemT]]", sources: Sequence[AsyncGenerator[ItemT, None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for source in sources:
        await source.aclose()
