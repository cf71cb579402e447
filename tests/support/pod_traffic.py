"""What callers do to a cluster of pods, and what they must never see."""

import asyncio
import contextlib
from dataclasses import dataclass, field

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from protos.wire.errors import EngineError, UnavailableError
from protos.wire.simulated_tokens import SimulatedVocabulary, expected_tokens

VOCABULARY = SimulatedVocabulary(8192, (8191,))
CALLERS, TOKENS = 6, 80


@dataclass
class Traffic:
    """Callers that ask for one answer after the other, and look at every token."""

    target: str
    only_serving: bool = False
    whole: int = 0
    lost: list[str] = field(default_factory=list)
    refused: int = 0
    """At the door, before anything was said; asked again."""
    _is_over: bool = False

    async def caller(self, number: int) -> None:
        options = GenerateOptions(max_tokens=TOKENS, ignore_eos=True, temperature=0)
        async with AsyncGenerationClient(self.target, only_serving=self.only_serving) as client:
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

    async def more(self) -> None:
        """So many whole answers more that each caller has one that it asked for after this."""
        wanted = self.whole + 2 * CALLERS
        while self.whole < wanted:
            await asyncio.sleep(0.01)

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
