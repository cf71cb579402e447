"""The scheduler of a served group, killed and started again while streams run, and what callers saw of it."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import Chunk, Finish, GenerateOptions, Prompt
from tests.support.served import Served

SUPERVISED_EVERY_S = 0.02


@dataclass
class Sample:
    """What one caller has of one sample; whatever comes must follow what came before."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[object] = field(default_factory=list)
    finish: Finish | None = None
    seed: int | None = None

    def take(self, chunk: Chunk) -> None:
        assert self.finish is None, "a chunk after the last"
        assert not chunk.token_ids or chunk.first_pos == len(self.ids), "a token skipped or repeated"
        assert not chunk.text or chunk.text_offset == len(self.text.encode()), "text skipped or repeated"
        self.ids.extend(chunk.token_ids)
        self.text += chunk.text
        self.logprobs.extend(chunk.logprobs)
        self.finish = chunk.finish
        self.seed = chunk.seed


@dataclass
class Answer:
    """What one caller got, and when."""

    samples: dict[int, Sample] = field(default_factory=dict)
    request_ids: set[str] = field(default_factory=set)
    prompts: list[object] = field(default_factory=list)
    """Whatever was said of the prompt, each time."""
    new_tokens_at: list[float] = field(default_factory=list)

    @property
    def content(self) -> dict[int, Sample]:
        return dict(sorted(self.samples.items()))


async def ask(
    client: AsyncGenerationClient, prompt: Prompt, options: GenerateOptions, *, seen: asyncio.Event, after: int
) -> Answer:
    """The whole answer; `seen` is set once a sample has more than `after` ids."""
    answer = Answer()
    async for chunk in client.stream(prompt, options):
        sample = answer.samples.setdefault(chunk.sample_index, Sample())
        sample.take(chunk)
        if chunk.request_id:
            answer.request_ids.add(chunk.request_id)
        if chunk.prompt_text is not None or chunk.prompt.logprobs:
            answer.prompts.append((chunk.prompt_text, chunk.prompt.logprobs))
        if chunk.token_ids:
            answer.new_tokens_at.append(time.monotonic())
        if len(sample.ids) > after:
            seen.set()
    return answer


@contextlib.asynccontextmanager
async def supervised(server: Served) -> AsyncIterator[None]:
    """Dead processes of the group are started again."""

    async def watch() -> None:
        while True:
            server.group.supervise()
            await asyncio.sleep(SUPERVISED_EVERY_S)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def kill_scheduler(server: Served) -> float:
    """Kill the scheduler; when it was started again."""
    old = server.group.pids()[-1]
    os.kill(old, signal.SIGKILL)
    while server.group.pids()[-1] == old:
        await asyncio.sleep(0.001)
    return time.monotonic()
