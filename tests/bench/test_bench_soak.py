"""10,000 requests on a simulated worker: what each leaves behind in every process."""

import asyncio

import numpy as np
import psutil
import pytest

from protos.client.fetch_model import fetch_model
from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from protos.client.serve_command import SimulatedOptions
from protos.client.simulated_model import SIMULATED_MODEL
from tests.support.served import served_for_figures

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]
REQUESTS, ROUND, CONCURRENT = 10_000, 500, 32
WARM_UP_ROUNDS = 8
"""Caches of pages, tries and interpreters fill first."""
SLOPE_BYTES = 1024
SETTLED_S = 0.5


async def one_round(client: AsyncGenerationClient, first: int) -> None:
    async def caller(start: int) -> None:
        for number in range(first + start, first + ROUND, CONCURRENT):
            prompt = TokenIds((number % 8000, number // 8000, 7, 8))
            options = GenerateOptions(max_tokens=3, ignore_eos=True, temperature=0.5, seed=number)
            got = [token async for chunk in client.stream(prompt, options) for token in chunk.token_ids]
            assert len(got) == 3

    await asyncio.gather(*(caller(start) for start in range(CONCURRENT)))


def sizes(processes: list[psutil.Process]) -> list[tuple[int, int, int]]:
    """Resident bytes, descriptors and threads."""
    return [(process.memory_info().rss, process.num_fds(), process.num_threads()) for process in processes]


async def test_bench_soak(tmp_path, capsys):
    fetch_model(SIMULATED_MODEL, cache=tmp_path)
    steps = SimulatedOptions(simulated_step_ms=1.0)
    seen = []
    with served_for_figures(device="simulated", model_cache=tmp_path, simulated=steps, numerics="fast") as server:
        processes = server.processes()
        names = [" ".join(process.cmdline()[1:5])[:48] for process in processes]
        async with AsyncGenerationClient(server.target) as client:
            for first in range(0, REQUESTS, ROUND):
                await one_round(client, first)
                await asyncio.sleep(SETTLED_S)
                seen.append(sizes(processes))
    late = np.array(seen[WARM_UP_ROUNDS:], np.int64)
    done = ROUND * np.arange(len(late))
    with capsys.disabled():
        for index, name in enumerate(names):
            rss, fds, threads = late[:, index].T
            slope = np.polyfit(done, rss, 1)[0]
            print(
                f"\n{name}: {slope:.0f} bytes a request (goal {SLOPE_BYTES}), {rss[-1] / 2**20:.0f} MiB, "
                f"descriptors {fds.min()}..{fds.max()}, threads {threads.min()}..{threads.max()}"
            )
    assert len(seen) == REQUESTS // ROUND
