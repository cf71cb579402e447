"""Many short requests on a served group: what each leaves behind in every process, and whether workers stay trusted."""

import asyncio
import math
import time
from dataclasses import dataclass, field

import numpy as np
import psutil

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from tests.support.served import Served, losses

ROUND, CONCURRENT, TOKENS = 500, 32, 3
WARM_UP_ROUNDS, WARM_UP_TOKENS = 8, 64
"""Caches of pages and tries fill first, and the pieces of all tokens: bounded, and no request's."""
SLOPE_BYTES = 1024
LEAST_REQUESTS = 5000
"""For a slope to be more than noise."""
SETTLED_S = 0.5


@dataclass
class SoakReport:
    """By process: resident bytes, descriptors and threads after each round behind the warm-up."""

    names: list[str]
    requests: int = 0
    losses: int = 0
    """Terms of workers that ended."""
    seen: list[list[tuple[int, int, int]]] = field(default_factory=list)

    def slopes(self) -> list[float]:
        """Bytes a request, by process; empty: too few requests to say."""
        if len(self.seen) * ROUND < LEAST_REQUESTS:
            return []
        sizes = np.array(self.seen, np.int64)[:, :, 0]
        return [float(slope) for slope in np.polyfit(ROUND * np.arange(len(sizes)), sizes, 1)[0]]

    def wrong(self) -> list[str]:
        """What must not be; empty: all is well."""
        grown = [f"{name} grows" for name, slope in zip(self.names, self.slopes(), strict=False) if slope > SLOPE_BYTES]
        return [*grown, *([f"{self.losses} workers were given up"] if self.losses else [])]

    def text(self) -> str:
        lines = [f"{self.requests} requests, {self.losses} workers given up"]
        slopes = self.slopes() or [math.nan] * len(self.names)
        for index, (name, slope) in enumerate(zip(self.names, slopes, strict=True)):
            if self.seen:
                rss, descriptors, threads = zip(*(sizes[index] for sizes in self.seen), strict=True)
                lines.append(
                    f"  {name}: {slope:.0f} bytes a request (goal {SLOPE_BYTES}), {rss[-1] / 2**20:.0f} MiB, "
                    f"descriptors {min(descriptors)}..{max(descriptors)}, threads {min(threads)}..{max(threads)}"
                )
        return "\n".join(lines)


async def soak(
    server: Served, *, most_requests: int, warm_up_tokens: int = WARM_UP_TOKENS, until: float = math.inf
) -> SoakReport:
    """Ask until there were so many requests behind the warm-up, or the time (monotonic) is over."""
    processes = server.processes()
    report = SoakReport([_name(process) for process in processes])
    before = await asyncio.to_thread(losses, server)
    async with AsyncGenerationClient(server.target) as client:
        for first in range(0, WARM_UP_ROUNDS * ROUND, ROUND):
            if time.monotonic() < until:
                await _round(client, first, tokens=warm_up_tokens)
                report.requests += ROUND
        for first in range(0, most_requests, ROUND):
            if time.monotonic() < until:
                await _round(client, WARM_UP_ROUNDS * ROUND + first, tokens=TOKENS)
                await asyncio.sleep(SETTLED_S)
                report.requests += ROUND
                report.seen.append([_sizes(process) for process in processes])
    report.losses = await asyncio.to_thread(losses, server) - before
    return report


async def _round(client: AsyncGenerationClient, first: int, *, tokens: int) -> None:
    async def caller(start: int) -> None:
        for number in range(first + start, first + ROUND, CONCURRENT):
            prompt = TokenIds((number % 8000, number // 8000, 7, 8))
            options = GenerateOptions(max_tokens=tokens, ignore_eos=True, temperature=0.5, seed=number)
            got = [token async for chunk in client.stream(prompt, options) for token in chunk.token_ids]
            assert len(got) == tokens

    await asyncio.gather(*(caller(start) for start in range(CONCURRENT)))


def _sizes(process: psutil.Process) -> tuple[int, int, int]:
    return process.memory_info().rss, process.num_fds(), process.num_threads()


def _name(process: psutil.Process) -> str:
    """`worker_svc`, `scheduler_svc core`, ...: what it runs, and as what."""
    line = process.cmdline()
    role = line[line.index("--role") + 1] if "--role" in line else ""
    return f"{line[line.index('-m') + 1]} {role}".strip()
