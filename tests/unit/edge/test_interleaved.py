import asyncio
from collections.abc import AsyncGenerator

import pytest

from protos.wire.errors import DeadlinePassed, InternalFault
from scheduler_svc.edge.interleaved import interleaved

CLOSED: list[str] = []


async def source(name: str, count: int, *, pause_s: float = 0.0, error: Exception | None = None) -> AsyncGenerator[str]:
    try:
        for index in range(count):
            await asyncio.sleep(pause_s)
            yield f"{name}{index}"
        if error is not None:
            raise error
    finally:
        CLOSED.append(name)


async def taken(*sources: AsyncGenerator[str]) -> list[str]:
    CLOSED.clear()
    return [item async for item in interleaved(sources)]


async def test_items_come_in_order_within_each_source() -> None:
    items = await taken(source("a", 3), source("b", 5), source("c", 0), source("d", 2, pause_s=0.002))
    assert sorted(items) == sorted([*(f"a{i}" for i in range(3)), *(f"b{i}" for i in range(5)), "d0", "d1"])
    for name in "abd":
        assert [item for item in items if item[0] == name] == sorted(item for item in items if item[0] == name)
    assert sorted(CLOSED) == list("abcd")


async def test_the_first_failure_comes_after_what_the_others_have_at_once() -> None:
    items: list[str] = []
    first, second = InternalFault("first"), DeadlinePassed("second")
    sources = [source("a", 1, error=first), source("b", 4), source("c", 2, pause_s=60), source("d", 2, error=second)]
    CLOSED.clear()
    with pytest.raises(InternalFault, match="first"):
        await fill(items, sources)
    assert sorted(items) == ["a0", "b0", "b1", "b2", "b3", "d0", "d1"]
    assert sorted(CLOSED) == list("abcd")


async def fill(items: list[str], sources: list[AsyncGenerator[str]]) -> None:
    async for item in interleaved(sources):
        items.append(item)


async def test_leaving_closes_every_source() -> None:
    CLOSED.clear()
    merged = interleaved([source("a", 3), source("b", 3, pause_s=60)])
    assert await anext(merged) == "a0"
    await merged.aclose()
    assert sorted(CLOSED) == ["a", "b"]
