"""Two hundred hostile grammars over gRPC while well-behaved streams decode: are these slower than beside other work?

Rounds alternate: grammars, then burners that use as much processor time as the grammars' processes did. What counts is
the time between tokens of the streams, whose ids have to be those of an undisturbed run.

    python -m pytest -m bench -s tests/bench/test_bench_hostile_grammars.py
"""

import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions
from scheduler_svc.text.grammar_source import GrammarKind, GrammarSource
from tests.support.hostile_grammars import hostile_grammars
from tests.support.hostile_requests import PROMPT, ask_for, check_refusal
from tests.support.served import Served, served_for_figures

pytestmark = [pytest.mark.bench, pytest.mark.model, pytest.mark.timeout(3600)]
ROUNDS, STREAMS, AT_ONCE = 4, 2, 4
PLAIN = GenerateOptions(max_tokens=64, temperature=0.0, ignore_eos=True)
MOST_SLOWER = 1.15
"""Of medians, on a machine that others use as well."""


class Round(NamedTuple):
    """One round."""

    gaps_s: list[float]
    wall_s: float
    grammar_cpu_s: float


async def gaps(client: AsyncGenerationClient, expected: Sequence[int]) -> list[float]:
    """Seconds between the tokens of one stream."""
    found, ids, last = [], [], time.monotonic()
    async for chunk in client.stream(PROMPT, PLAIN):
        now = time.monotonic()
        found += [(now - last) / max(1, len(chunk.token_ids))] * len(chunk.token_ids)
        ids += chunk.token_ids
        last = now
    assert list(ids) == list(expected)
    return found[1:]


async def streams_until(client: AsyncGenerationClient, expected: Sequence[int], end: asyncio.Event) -> list[float]:
    found: list[float] = []
    while not end.is_set():
        found += await gaps(client, expected)
    return found


def grammar_cpu_s(server: Served) -> dict[int, float]:
    used = {}
    for process in server.processes():
        with contextlib.suppress(psutil.Error):
            if "scheduler_svc.text.grammar_process" in process.cmdline():
                used[process.pid] = sum(process.cpu_times()[:2])
    return used


class CpuWatch:
    """Processor time of grammar processes, those that ended included, as last seen."""

    def __init__(self, server: Served) -> None:
        self._server = server
        self._begun = grammar_cpu_s(server)
        self._seen = dict(self._begun)

    async def watch(self, end: asyncio.Event) -> None:
        while not end.is_set():
            self._seen |= await asyncio.to_thread(grammar_cpu_s, self._server)
            await asyncio.sleep(0.25)

    @property
    def spent_s(self) -> float:
        return sum(self._seen.values()) - sum(self._begun.values())


async def beside_grammars(
    client: AsyncGenerationClient, server: Served, *, sources: Sequence[GrammarSource], expected: Sequence[int]
) -> Round:
    end, watch, began = asyncio.Event(), CpuWatch(server), time.monotonic()
    watching = asyncio.create_task(watch.watch(end))
    streaming = [asyncio.create_task(streams_until(client, expected, end)) for _ in range(STREAMS)]
    waiting = list(sources)

    async def caller() -> None:
        while waiting:
            source = waiting.pop()
            error = await ask_for(client, source)
            if error is not None:
                check_refusal(source, error)

    await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
    wall_s = time.monotonic() - began
    end.set()
    found = await asyncio.gather(*streaming)
    await watching
    return Round([gap for one in found for gap in one], wall_s, watch.spent_s)


@contextlib.asynccontextmanager
async def burners(cpu_share: float) -> AsyncIterator[None]:
    """Two processes, as many as work on grammars, that use so much of a processor together."""
    command = [sys.executable, str(Path(__file__).parent / "cpu_burner.py"), str(max(cpu_share / 2, 0.01))]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(2)]
    try:
        yield
    finally:
        for process in running:
            process.communicate(timeout=10)


async def beside_burners(client: AsyncGenerationClient, like: Round, expected: Sequence[int]) -> Round:
    end = asyncio.Event()
    async with burners(like.grammar_cpu_s / like.wall_s):
        asyncio.get_running_loop().call_later(like.wall_s, end.set)
        found = await asyncio.gather(*(streams_until(client, expected, end) for _ in range(STREAMS)))
    return Round([gap for one in found for gap in one], like.wall_s, like.grammar_cpu_s)


async def measure(server: Served) -> float:
    sources = [source for source in hostile_grammars() if source.kind is not GrammarKind.CHOICE]
    async with AsyncGenerationClient(server.target) as client:
        (alone,) = await client.generate([PROMPT], PLAIN)
        quiet = await gaps(client, alone.token_ids)
        pairs = []
        for part in range(ROUNDS):
            hostile = await beside_grammars(client, server, sources=sources[part::ROUNDS], expected=alone.token_ids)
            pairs.append((hostile, await beside_burners(client, hostile, alone.token_ids)))
        assert await gaps(client, alone.token_ids)
    medians = [[statistics.median(one.gaps_s) * 1e3 for one in column] for column in zip(*pairs, strict=True)]
    grammars_ms, burners_ms = (statistics.median(column) for column in medians)
    shares = [hostile.grammar_cpu_s / hostile.wall_s for hostile, _ in pairs]
    print(
        f"\nbetween tokens, {STREAMS} streams: undisturbed {statistics.median(quiet) * 1e3:.1f} ms, beside "
        f"{len(sources)} hostile grammars {grammars_ms:.1f} ms ({statistics.fmean(shares):.2f} of a core), beside "
        f"equal burners {burners_ms:.1f} ms, ratio {grammars_ms / burners_ms:.2f}"
    )
    return grammars_ms / burners_ms


def test_streams_beside_hostile_grammars() -> None:
    with served_for_figures(numerics="fast") as server:
        ratio = asyncio.run(measure(server))
        assert len(grammar_cpu_s(server)) <= 2
    assert ratio <= MOST_SLOWER
