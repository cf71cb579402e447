"""A worker killed while streams run: `serve` starts it again, and every stream goes on with the same tokens."""

import asyncio
import os
import signal

import pytest

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from tests.support.scheduler_kill import supervised
from tests.support.served import served

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
STREAMS, TOKENS, SEEN_BEFORE_THE_KILL = 4, 160, 20


async def ask(client, number, seen):
    options = GenerateOptions(max_tokens=TOKENS, temperature=0.8, seed=number, ignore_eos=True)
    ids = []
    async for chunk in client.stream(TokenIds((40 + number, 50, 60)), options):
        assert chunk.first_pos == len(ids)
        ids.extend(chunk.token_ids)
        if len(ids) >= SEEN_BEFORE_THE_KILL:
            seen.set()
    return ids


async def test_streams_of_a_killed_worker_go_on_with_the_tokens_of_an_undisturbed_run():
    with served(numerics="fast") as server:
        async with supervised(server), AsyncGenerationClient(server.target) as client:
            undisturbed = await asyncio.gather(*(ask(client, number, asyncio.Event()) for number in range(STREAMS)))
            seen = asyncio.Event()
            streams = [asyncio.create_task(ask(client, number, seen)) for number in range(STREAMS)]
            await seen.wait()
            killed = server.group.pids()[0]
            os.kill(killed, signal.SIGKILL)
            assert await asyncio.gather(*streams) == undisturbed
        assert server.group.pids()[0] != killed
    assert [len(ids) for ids in undisturbed] == [TOKENS] * STREAMS
