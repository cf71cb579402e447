"""Fault cycles on real processes: streams run, something is struck, every stream must get the tokens of the model."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from protos.wire.simulated_tokens import SimulatedVocabulary, TokenDraw, expected_tokens
from tests.support.served import Served

VOCABULARY = SimulatedVocabulary(8192, (8191,))
STREAMS = 12
TOKENS = 150
SEEN_BEFORE = 15


class Strike(StrEnum):
    """What happens in a cycle."""

    KILL = "worker killed"
    STOP_SHORT = "worker stopped for a moment"
    STOP_LONG = "worker stopped until it is given up"
    KILL_TWO = "two workers killed"
    VANISH = "callers vanish"


_STOPPED_S = {Strike.STOP_SHORT: 0.4, Strike.STOP_LONG: 4.5}


@dataclass
class CycleReport:
    """What the cycles reached."""

    strikes: Counter[Strike] = field(default_factory=Counter)
    requests: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0
    """Between two chunks of one stream."""

    def add(self, other: "CycleReport") -> None:
        self.strikes.update(other.strikes)
        self.requests += other.requests
        self.tokens += other.tokens
        self.wrong += other.wrong
        self.longest_gap_s = max(self.longest_gap_s, other.longest_gap_s)

    def text(self) -> str:
        kinds = ", ".join(f"{kind.value}: {count}" for kind, count in sorted(self.strikes.items()))
        return (
            f"{self.strikes.total()} fault cycles ({kinds}), {self.requests} requests, {self.tokens} tokens, "
            f"{len(self.wrong)} wrong, longest gap {self.longest_gap_s:.1f} s"
        )


class FaultCycles:
    """Cycles on one group of simulated workers. One seed decides prompts, draws and victims."""

    def __init__(self, server: Served, *, workers: int, seed: int) -> None:
        self.report = CycleReport()
        self._server = server
        self._workers = workers
        self._random = random.Random(seed)

    async def run(self, strikes: list[Strike]) -> CycleReport:
        """One cycle for each."""
        watch = asyncio.create_task(self._supervise())
        try:
            async with AsyncGenerationClient(self._server.target) as client:
                for strike in strikes:
                    await self._cycle(client, strike)
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        return self.report

    async def _supervise(self) -> None:
        while True:
            self._server.group.supervise()
            await asyncio.sleep(0.1)

    async def _cycle(self, client: AsyncGenerationClient, strike: Strike) -> None:
        begun = asyncio.Event()
        streams = [asyncio.create_task(self._stream(client, begun, strike)) for _ in range(STREAMS)]
        await begun.wait()
        await self._strike(strike, streams)
        for ended in await asyncio.gather(*streams, return_exceptions=True):
            if isinstance(ended, Exception):
                self.report.wrong.append(f"{strike}: {ended!r}")
        self.report.strikes[strike] += 1

    async def _stream(self, client: AsyncGenerationClient, begun: asyncio.Event, strike: Strike) -> None:
        prompt = [self._random.randrange(8000) for _ in range(self._random.randint(5, 120))]
        temperature, seed = self._random.choice([0.0, 0.8]), self._random.getrandbits(32)
        options = GenerateOptions(max_tokens=TOKENS, ignore_eos=True, temperature=temperature, seed=seed, top_k=40)
        self.report.requests += 1
        got: list[int] = []
        last = time.monotonic()
        async for chunk in client.stream(TokenIds(tuple(prompt)), options):
            assert chunk.first_pos == len(got), "a token skipped or repeated"
            got.extend(chunk.token_ids)
            now = time.monotonic()
            self.report.longest_gap_s = max(self.report.longest_gap_s, now - last)
            last = now
            if len(got) >= SEEN_BEFORE:
                begun.set()
        draw = TokenDraw(temperature=temperature, seed=seed, top_k=40)
        whole = expected_tokens(prompt, TOKENS, vocabulary=VOCABULARY, draw=draw)
        assert got == whole, f"other tokens than undisturbed, from {_first_difference(got, whole)} on"
        self.report.tokens += len(got)

    async def _strike(self, strike: Strike, streams: "list[asyncio.Task[None]]") -> None:
        workers = self._server.group.pids()[: self._workers]
        if strike is Strike.VANISH:
            for stream in self._random.sample(streams, len(streams) // 2):
                stream.cancel()
        elif strike in _STOPPED_S:
            victim = self._random.choice(workers)
            os.kill(victim, signal.SIGSTOP)
            try:
                await asyncio.sleep(_STOPPED_S[strike])
            finally:
                os.kill(victim, signal.SIGCONT)
        else:
            for victim in self._random.sample(workers, 2 if strike is Strike.KILL_TWO else 1):
                os.kill(victim, signal.SIGKILL)


def _first_difference(got: list[int], whole: list[int]) -> int:
    return next((index for index, pair in enumerate(zip(got, whole, strict=False)) if pair[0] != pair[1]), len(got))
