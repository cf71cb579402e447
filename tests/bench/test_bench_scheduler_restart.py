"""A scheduler killed under 16 streams: from the exec of the next to its attach, and to callers' first new tokens."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from protos.client.fetch_model import fetch_model
from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from protos.client.serve_command import SimulatedOptions
from protos.client.simulated_model import SIMULATED_MODEL
from protos.forwardplane.v1.worker_pb2 import WorkerReport
from tests.support.scheduler_kill import ask, kill_scheduler, supervised
from tests.support.served import Served, served_for_figures
from tests.support.worker_client import WorkerClient

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]
STREAMS, PROMPT, TOKENS, ROUNDS = 16, 56, 200, 3
ATTACH_S, FIRST_TOKEN_S = 1.0, 2.0
REPORT_MS = 10


async def reports(server: Served) -> AsyncGenerator[WorkerReport, None]:
    """Of the first worker."""
    worker = WorkerClient(server.options.ports.worker_port)
    try:
        async for report in worker.report(interval_ms=REPORT_MS):
            yield report
    finally:
        await worker.close()


async def attached(server: Served, epoch: int) -> float:
    """When the first worker serves a higher epoch than that, within a report's interval."""
    async with aclosing(reports(server)) as found:
        async for report in found:
            if report.epoch > epoch:
                return time.monotonic()
    raise AssertionError("the worker ended")


async def epoch_of(server: Served) -> int:
    async with aclosing(reports(server)) as found:
        async for report in found:
            return int(report.epoch)
    raise AssertionError("the worker ended")


async def one_round(server: Served, client: AsyncGenerationClient) -> tuple[float, float, float]:
    """Seconds from exec to the attach, to the first new token of the first caller, and of the last."""
    options = GenerateOptions(max_tokens=TOKENS, ignore_eos=True, temperature=0)
    seen = asyncio.Event()
    prompts = [tuple((number * 41 + 7 * index) % 8000 for index in range(PROMPT)) for number in range(STREAMS)]
    streams = [asyncio.create_task(ask(client, TokenIds(ids), options, seen=seen, after=30)) for ids in prompts]
    epoch = await epoch_of(server)
    await seen.wait()
    attaching = asyncio.create_task(attached(server, epoch))
    begun = await kill_scheduler(server)
    answers = await asyncio.gather(*streams)
    first = [min(at for at in answer.new_tokens_at if at > begun) - begun for answer in answers]
    return await attaching - begun, min(first), max(first)


async def test_bench_scheduler_restart(tmp_path, capsys):
    fetch_model(SIMULATED_MODEL, cache=tmp_path)
    steps = SimulatedOptions(simulated_step_ms=5.0)
    with served_for_figures(
        device="simulated", workers=1, model_cache=tmp_path, simulated=steps, numerics="fast"
    ) as server:
        async with supervised(server), AsyncGenerationClient(server.target) as client:
            rounds = [await one_round(server, client) for _ in range(ROUNDS)]
    with capsys.disabled():
        for attach_s, first_s, last_s in rounds:
            print(
                f"\nexec -> attach {attach_s:.2f} s (goal {ATTACH_S:g}), first new token {first_s:.2f} s (goal "
                f"{FIRST_TOKEN_S:g}), of the last of {STREAMS} callers {last_s:.2f} s"
            )
    assert len(rounds) == ROUNDS
