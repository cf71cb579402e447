"""A rollout rehearsed with processes as pods would do it: no request is lost, and each gets the model's tokens."""

import asyncio
import contextlib
from dataclasses import dataclass, field

import pytest

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from protos.wire.errors import EngineError, UnavailableError
from protos.wire.simulated_tokens import SimulatedVocabulary, expected_tokens
from tests.support.manifest_policy import SCHEDULER
from tests.support.pods import cluster

pytestmark = pytest.mark.timeout(180)
VOCABULARY = SimulatedVocabulary(8192, (8191,))
CALLERS, TOKENS = 6, 80


@dataclass
class Traffic:
    """Callers that ask for one answer after the other, and look at every token."""

    target: str
    whole: int = 0
    lost: list[str] = field(default_factory=list)
    refused: int = 0
    """At the door, before anything was said; asked again."""
    _is_over: bool = False

    async def caller(self, number: int) -> None:
        options = GenerateOptions(max_tokens=TOKENS, ignore_eos=True, temperature=0)
        async with AsyncGenerationClient(self.target) as client:
            while not self._is_over:
                number += CALLERS
                prompt = tuple((number * 37 + 11 * index) % 8000 for index in range(20 + number % 30))
                await self._answer(client, prompt, options)

    async def _answer(self, client: AsyncGenerationClient, prompt: tuple[int, ...], options: GenerateOptions) -> None:
        ids: list[int] = []
        try:
            async for chunk in client.stream(TokenIds(prompt), options):
                assert not chunk.token_ids or chunk.first_pos == len(ids), "a token skipped or repeated"
                ids.extend(chunk.token_ids)
            assert ids == expected_tokens(list(prompt), TOKENS, vocabulary=VOCABULARY), "wrong tokens"
            self.whole += 1
        except UnavailableError as error:
            if ids:
                self.lost.append(f"after {len(ids)} tokens: {error!r}")
            self.refused += 1
            await asyncio.sleep(0.1)
        except (EngineError, AssertionError) as error:
            self.lost.append(repr(error))

    @contextlib.asynccontextmanager
    async def going_on(self):
        """Around what must lose nothing; ends with the answers that are on their way then."""
        callers = [asyncio.create_task(self.caller(number)) for number in range(CALLERS)]
        while self.whole < CALLERS:
            await asyncio.sleep(0.01)
        before = self.whole
        yield
        self._is_over = True
        await asyncio.gather(*callers)
        assert self.lost == []
        assert self.whole - before >= 2 * CALLERS


async def test_a_rolling_update_of_workers_and_scheduler_loses_no_request():
    async with cluster(workers=2) as pods:
        (scheduler,) = (pod for pod in pods.pods if pod.name == SCHEDULER)
        traffic = Traffic(pods.target)
        async with traffic.going_on():
            for worker in list(pods.ready):  # no surge: one goes before the next comes
                assert await pods.delete(worker) == 0
                await pods.worker()
            assert traffic.refused == 0, "callers do not notice that workers are replaced"
            assert await pods.delete(scheduler) == 0
            await pods.is_ready(await pods.scheduler())
        assert pods.api.annotation("forwardplane-epoch") == "2"


async def test_a_kill_and_a_drain_at_once_lose_no_request():
    async with cluster(workers=3) as pods:
        (scheduler,) = (pod for pod in pods.pods if pod.name == SCHEDULER)
        first, second, third = pods.ready
        traffic = Traffic(pods.target)
        async with traffic.going_on():
            code, _ = await asyncio.gather(pods.delete(first), pods.kill(second))
            assert code == 0
            assert traffic.refused == 0
            await pods.worker()
            code, _ = await asyncio.gather(pods.delete(scheduler), pods.kill(third))
            assert code == 0
            await pods.is_ready(await pods.scheduler())
