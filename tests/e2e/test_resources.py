"""What the services may use: nothing while idle, and nothing more after a thousand requests than before."""

import asyncio
import time

import pytest

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from tests.support.served import Served, served

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
IDLE_S = 20.0
REQUESTS = 1000
CONCURRENT = 16


@pytest.fixture(scope="module")
def server():
    with served(numerics="fast") as running:
        yield running


def cpu_seconds(server: Served) -> float:
    times = [process.cpu_times() for process in server.processes()]
    return sum(item.user + item.system for item in times)


def descriptors_and_threads(server: Served) -> list[tuple[int, int]]:
    return [(process.num_fds(), process.num_threads()) for process in server.processes()]


async def run_requests(server: Served, count: int) -> None:
    async with AsyncGenerationClient(server.target) as client:

        async def worker(start: int) -> None:
            for number in range(start, count, CONCURRENT):
                options = GenerateOptions(max_tokens=2, temperature=0.0, ignore_eos=True)
                chunks = [chunk async for chunk in client.stream(TokenIds((number % 1000 + 20, 30)), options)]
                assert sum(len(chunk.token_ids) for chunk in chunks) == 2

        await asyncio.gather(*(worker(start) for start in range(CONCURRENT)))


async def test_a_thousand_requests_leave_pages_threads_and_descriptors_where_they_started(server):
    await run_requests(server, 64)
    await asyncio.sleep(1.0)
    before = descriptors_and_threads(server)
    await run_requests(server, REQUESTS)
    await asyncio.sleep(1.0)
    async with AsyncGenerationClient(server.target) as client:
        load = await client.load()
    assert load.requests_running == load.requests_waiting == 0
    assert [worker.pages_used for worker in load.workers] == [0]
    assert descriptors_and_threads(server) == before


def test_idle_services_use_less_than_one_percent_of_a_core(server):
    time.sleep(2.0)
    shares = []
    for _ in range(3):
        before, begin = cpu_seconds(server), time.monotonic()
        time.sleep(IDLE_S)
        shares.append((cpu_seconds(server) - before) / (time.monotonic() - begin))
        if shares[-1] < 0.01:
            return
    raise AssertionError(f"idle, the services used {shares} of a core")
