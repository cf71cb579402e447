"""From a fault of a worker to the moment its scheduler knows: killed, stopped, partitioned; idle and busy.

Partitions are blackhole routes between network namespaces, and left out where there can be none.

    python -m pytest -m bench -s tests/bench/test_bench_fault_notice.py
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.client.fetch_model import fetch_model
from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from protos.client.simulated_model import SIMULATED_MODEL
from protos.wire.enums import WorkerState
from tests.support.net_spaces import NoNetSpaces
from tests.support.scheduler_kill import ask, supervised
from tests.support.struck_group import SCHEDULER, StruckGroup, Ways, struck_group, worker_end

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]
WORKERS, STREAMS, TOKENS, SEEN, ROUNDS = 2, 8, 1200, 20, 3
POLL_S, RESTARTED_S = 0.005, 60.0
GOALS_S = {"killed": 0.2, "stopped": 3.0, "partitioned": 3.0}


@contextlib.contextmanager
def struck(group: StruckGroup, fault: str) -> Iterator[None]:
    """The first worker, until the context ends."""
    pid, spaces = group.server.group.pids()[0], group.spaces
    if spaces is not None and fault == "partitioned":
        spaces.cut(SCHEDULER, worker_end(0))
    else:
        os.kill(pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    try:
        yield
    finally:
        if spaces is not None:
            spaces.heal()
        if fault == "stopped":
            os.kill(pid, signal.SIGCONT)


async def serving(client: AsyncGenerationClient) -> int:
    return [worker.state for worker in (await client.load()).workers].count(WorkerState.SERVING)


async def until_serving(client: AsyncGenerationClient, count: int) -> float:
    """When that many workers serve; waiting for fewer, the first moment counts."""
    async with asyncio.timeout(RESTARTED_S):
        while await serving(client) != count:
            await asyncio.sleep(POLL_S)
    return time.monotonic()


async def noticed_s(group: StruckGroup, client: AsyncGenerationClient, fault: str, *, streams: int) -> float:
    await until_serving(client, WORKERS)
    options = GenerateOptions(max_tokens=TOKENS, ignore_eos=True, temperature=0)
    seen = [asyncio.Event() for _ in range(streams)]
    prompts = [TokenIds((number, 7, 9)) for number in range(streams)]
    asking = [
        asyncio.create_task(ask(client, prompt, options, seen=event, after=SEEN))
        for prompt, event in zip(prompts, seen, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in seen))
    begun = time.monotonic()
    with struck(group, fault):
        took_s = await until_serving(client, WORKERS - 1) - begun
    for answer in await asyncio.gather(*asking):
        assert len(answer.content[0].ids) == TOKENS
    return took_s


def partitioned_group(stack: contextlib.ExitStack, cache: Path) -> StruckGroup:
    """Between namespaces, or else between ports."""
    try:
        return stack.enter_context(struck_group(workers=WORKERS, cache=cache, ways=Ways.SPACES))
    except NoNetSpaces:
        return stack.enter_context(struck_group(workers=WORKERS, cache=cache))


async def figures(group: StruckGroup, fault: str) -> list[str]:
    """A line for idle and one for busy."""
    lines = []
    async with supervised(group.server), AsyncGenerationClient(group.target) as client:
        for name, streams in (("idle", 0), ("busy", STREAMS)):
            took_s = sorted([await noticed_s(group, client, fault, streams=streams) for _ in range(ROUNDS)])
            shown = ", ".join(f"{seconds:.3f}" for seconds in took_s)
            lines.append(f"{fault}, {name}: noticed after {shown} s (goal {GOALS_S[fault]:g})")
    return lines


async def test_bench_fault_notice(tmp_path: Path, capsys):
    fetch_model(SIMULATED_MODEL, cache=tmp_path)
    with contextlib.ExitStack() as stack:
        group = partitioned_group(stack, tmp_path)
        faults = [fault for fault in GOALS_S if fault != "partitioned" or group.spaces is not None]
        lines = [line for fault in faults for line in await figures(group, fault)]
    with capsys.disabled():
        print("", *lines, sep="\n")
