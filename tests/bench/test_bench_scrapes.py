"""What a scrape takes while requests run: every metrics port with four simulated workers, 20 a second.

Goal: below 10 ms. A scraper gets its answer from a thread beside the event loop, so the figures hold its wait for the
interpreter too.

    python -m pytest -m bench -s tests/bench/test_bench_scrapes.py
"""

import asyncio
import http.client
import threading
import time

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from protos.client.serve_command import SimulatedOptions
from tests.support.served import served_for_figures

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]
STREAMS, WORKERS = 16, 4
SECONDS, EVERY_S = 8.0, 0.05


async def streams(target, is_over):
    options = GenerateOptions(max_tokens=200, ignore_eos=True)
    async with AsyncGenerationClient(target) as client:

        async def caller(number):
            while not is_over.is_set():
                async for _ in client.stream(TokenIds(tuple(range(10, 60 + number))), options):
                    pass

        await asyncio.gather(*(caller(number) for number in range(STREAMS)))


def scraped(port, taken, sizes):
    """Every 50 ms on one connection for each scrape, as the endpoint picker does."""
    begun = time.monotonic()
    for turn in range(int(SECONDS / EVERY_S)):
        time.sleep(max(0.0, begun + turn * EVERY_S - time.monotonic()))
        asked = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/metrics")
        sizes.append(len(connection.getresponse().read()))
        taken.append(time.perf_counter() - asked)
        connection.close()


def measure(ports):
    found = {name: ([], []) for name in ports}
    threads = [threading.Thread(target=scraped, args=(port, *found[name])) for name, port in ports.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("loaded", [False, True], ids=["idle", "16 streams"])
def test_scrapes(loaded):
    simulated = SimulatedOptions(simulated_step_ms=20.0)
    with served_for_figures(device="simulated", numerics="fast", workers=WORKERS, simulated=simulated) as server:
        at = server.options.ports
        ports = {"core": at.metrics_port, "edge": at.edge_metrics_port, "worker": at.worker_metrics_port}
        is_over = threading.Event()
        calling = threading.Thread(target=lambda: asyncio.run(streams(server.target, is_over)))
        if loaded:
            calling.start()
            time.sleep(1.0)
        found = measure(ports)
        is_over.set()
        if loaded:
            calling.join()
    table = Table("port", "scrapes", "KiB", "p50 ms", "p90 ms", "p99 ms", title=f"loaded: {loaded}")
    for name, (taken, sizes) in found.items():
        quantiles = (f"{value * 1e3:.2f}" for value in np.quantile(taken, [0.5, 0.9, 0.99]))
        table.add_row(name, str(len(taken)), f"{max(sizes) / 1024:.0f}", *quantiles)
    Console(width=100).print(table)
