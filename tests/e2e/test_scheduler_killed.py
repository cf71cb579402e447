"""The scheduler killed while streams run: another one is started, and every stream goes on with the same tokens."""

import asyncio
import contextlib
import dataclasses
import json

import pytest

from protos.client.fetch_model import fetch_model
from protos.client.generation_client import AsyncGenerationClient, GenerationClient
from protos.client.messages import Chat, GenerateOptions, TokenIds
from protos.client.serve_command import SimulatedOptions
from protos.client.simulated_model import SIMULATED_MODEL
from protos.wire.simulated_tokens import SimulatedVocabulary, TokenDraw, expected_tokens
from tests.support.scheduler_kill import ask, kill_scheduler, supervised
from tests.support.served import served

pytestmark = pytest.mark.timeout(300)
VOCABULARY = SimulatedVocabulary(8192, (8191,))
STREAMS, TOKENS, SEEN_BEFORE = 16, 200, 20


@contextlib.contextmanager
def simulated(cache):
    fetch_model(SIMULATED_MODEL, cache=cache)
    steps = SimulatedOptions(simulated_step_ms=5.0)
    with served(device="simulated", workers=2, model_cache=cache, simulated=steps, numerics="fast") as server:
        yield server


def prompt_of(number: int) -> tuple[int, ...]:
    return tuple((number * 37 + 11 * index) % 8000 for index in range(10 + number))


async def simulated_stream(client, number, seen):
    options = GenerateOptions(max_tokens=TOKENS, ignore_eos=True, temperature=0.8, seed=number, top_k=40)
    prompt = prompt_of(number)
    answer = await ask(client, TokenIds(prompt), options, seen=seen, after=SEEN_BEFORE)
    draw = TokenDraw(temperature=0.8, seed=number, top_k=40)
    assert answer.samples[0].ids == expected_tokens(list(prompt), TOKENS, vocabulary=VOCABULARY, draw=draw)
    assert len(answer.request_ids) == 1
    return answer


async def whole_answers(client):
    options = GenerateOptions(max_tokens=TOKENS, ignore_eos=True, temperature=0)
    generations = await client.generate([TokenIds(prompt_of(number)) for number in (3, 4)], options)
    for number, generation in zip((3, 4), generations, strict=True):
        assert list(generation.token_ids) == expected_tokens(list(prompt_of(number)), TOKENS, vocabulary=VOCABULARY)


def read_blocking(target):
    ids: list[int] = []
    options = GenerateOptions(max_tokens=TOKENS, ignore_eos=True, temperature=0)
    with GenerationClient(target) as client:
        for chunk in client.stream(TokenIds(prompt_of(5)), options):
            ids.extend(chunk.token_ids)
    assert ids == expected_tokens(list(prompt_of(5)), TOKENS, vocabulary=VOCABULARY)


async def test_streams_and_whole_answers_survive_two_schedulers(tmp_path):
    with simulated(tmp_path) as server:
        async with supervised(server), AsyncGenerationClient(server.target) as client:
            seen = asyncio.Event()
            streams = [asyncio.create_task(simulated_stream(client, number, seen)) for number in range(STREAMS)]
            others = [asyncio.create_task(whole_answers(client))]
            others.append(asyncio.create_task(asyncio.to_thread(read_blocking, server.target)))
            for _ in range(2):
                await seen.wait()
                seen.clear()
                started_again = await kill_scheduler(server)
            answers = await asyncio.gather(*streams)
            await asyncio.gather(*others)
    assert all(answer.new_tokens_at[-1] > started_again for answer in answers)


async def test_a_core_that_dies_alone_ends_its_scheduler_and_no_stream(tmp_path):
    with simulated(tmp_path) as server:
        async with supervised(server), AsyncGenerationClient(server.target) as client:
            seen = asyncio.Event()
            streams = [asyncio.create_task(simulated_stream(client, number, seen)) for number in range(4)]
            await seen.wait()
            (core,) = (process for process, line in server.command_lines().items() if "core" in line)
            core.kill()
            await asyncio.gather(*streams)


PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "name": {"type": "string", "maxLength": 60}},
    "required": ["age", "name"],
    "additionalProperties": False,
}
KINDS = {
    "samples": (Chat.user("Tell me a story."), GenerateOptions(max_tokens=60, temperature=0.9, seed=5, n=2)),
    "grammar": (
        Chat.user("Describe a person as JSON."),
        GenerateOptions(max_tokens=60, temperature=0.9, seed=7, json_schema=json.dumps(PERSON), logprobs=2),
    ),
    "penalties": (
        "1, 2, 3, 4,",
        GenerateOptions(
            max_tokens=60, temperature=0.7, seed=1, repetition_penalty=1.2, frequency_penalty=0.3, prompt_logprobs=1
        ),
    ),
}


STORY = Chat.user("What is gravity?")
AT_RANDOM = GenerateOptions(max_tokens=60, seed=2, temperature=0.9, echo=True)


async def with_late_stop_string(client):
    """A stop string that the model's answer comes to late."""
    (free,) = await client.generate([STORY], AT_RANDOM)
    text = free.text
    begin = next(
        begin for begin in range(len(text) * 2 // 3, len(text)) if text.find(text[begin : begin + 12]) == begin
    )
    return STORY, dataclasses.replace(AT_RANDOM, stop_strings=(text[begin : begin + 12], "zzz"))


@pytest.mark.model
async def test_streams_of_the_real_model_go_on_whatever_they_asked_for():
    with served(numerics="fast") as server:
        async with supervised(server), AsyncGenerationClient(server.target) as client:
            kinds = {**KINDS, "stop": await with_late_stop_string(client)}

            async def all_kinds(seen, after):
                asked = [ask(client, prompt, options, seen=seen, after=after) for prompt, options in kinds.values()]
                return await asyncio.gather(*asked)

            undisturbed = await all_kinds(asyncio.Event(), 0)
            seen = asyncio.Event()
            disturbed = asyncio.create_task(all_kinds(seen, 8))
            await seen.wait()
            started_again = await kill_scheduler(server)
            answers = await disturbed
    assert undisturbed[-1].samples[0].finish.stop_string is not None
    for kind, before, after in zip(kinds, undisturbed, answers, strict=True):
        assert after.new_tokens_at[-1] > started_again, f"{kind} was over before the scheduler died"
        assert after.content == before.content, kind
        assert after.prompts == before.prompts, kind
