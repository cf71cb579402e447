"""What the prefix cache of a served model finds again, and who shares it."""

import dataclasses

import pytest

from protos.client.generation_client import AsyncGenerationClient, GenerationClient
from protos.client.messages import GenerateOptions
from tests.support.served import served

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


async def ask(client, prompt, options):
    chunks = [chunk async for chunk in client.stream(prompt, options)]
    return [token_id for chunk in chunks for token_id in chunk.token_ids], chunks[-1].usage


@pytest.fixture(scope="module")
def server():
    with served(numerics="fast") as running:
        yield running


async def test_what_was_said_before_is_found_again(server):
    """Pages of the answer are cached too: the next turn begins behind them."""
    options = GenerateOptions(max_tokens=32, temperature=0.0, ignore_eos=True)
    text = "Once upon a time, in a village by the sea, there lived an old fisherman who"
    async with AsyncGenerationClient(server.target) as client:
        answer, first = await ask(client, text, options)
        ids = await client.tokenize(text)
        whole = await client.detokenize([*ids, *answer])
        _, second = await ask(client, whole + " Then", GenerateOptions(max_tokens=1))
    assert second.cached_tokens > first.prompt_tokens


def test_s13_a_salt_keeps_prefixes_apart(server):
    options = GenerateOptions(max_tokens=4, temperature=0.0)
    salted = dataclasses.replace(options, cache_salt="tenant-7")
    prompt = "The quick brown fox jumps over the lazy dog. " * 8
    with GenerationClient(server.target) as client:
        client.flush_cache()
        found = [
            client.generate([prompt], chosen)[0].usage.cached_tokens for chosen in (options, salted, salted, options)
        ]
        freed = client.flush_cache()
    assert found[:2] == [0, 0]
    assert found[2] == found[3] > 0
    assert freed >= 2 * found[2] // 16


def test_a_stop_string_that_ends_a_stream_at_once_still_tells_what_was_cached(server):
    prompt = "The quick brown fox jumps over the lazy dog. " * 8
    options = GenerateOptions(max_tokens=32, temperature=0.0, stop_strings=("the", "The", " ", "."))
    with GenerationClient(server.target) as client:
        client.generate([prompt], GenerateOptions(max_tokens=1))
        *_, last = client.stream(prompt, options)
    assert last.finish.stop_string is not None
    assert last.usage.cached_tokens > 0
