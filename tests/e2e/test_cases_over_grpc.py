"""The known answers of SmolLM2 over gRPC: alone, with 16 at once, and with budgets 16, 64 and 2048."""

import asyncio

import pytest

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import Chat, GenerateOptions, TokenIds
from tests.support.golden import assert_free_run, cases
from tests.support.served import Served, served

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
CASES = cases("smollm2_greedy.json")
MATES = 15


def options_of(case, **more):
    return GenerateOptions(max_tokens=len(case["greedy_ids"]), temperature=0.0, **more)


def prompt_of(case):
    return Chat.user(case["prompt"]) if case["kind"] == "chat" else case["prompt"]


async def ask(client, prompt, options):
    chunks = [chunk async for chunk in client.stream(prompt, options)]
    ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    return ids, "".join(chunk.text for chunk in chunks), chunks[-1]


async def all_alone(server: Served):
    async with AsyncGenerationClient(server.target) as client:
        return [await ask(client, prompt_of(case), options_of(case)) for case in CASES]


async def all_at_once(server: Served):
    async with AsyncGenerationClient(server.target) as client:
        tasks = [ask(client, prompt_of(case), options_of(case)) for case in CASES]
        tasks += [
            ask(
                client, TokenIds((5 + mate, 17, 300 + mate)), GenerateOptions(max_tokens=24, seed=mate, temperature=1.0)
            )
            for mate in range(16 - len(CASES))
        ]
        return (await asyncio.gather(*tasks))[: len(CASES)]


@pytest.fixture(scope="module")
def default_server():
    with served() as running:
        yield running


@pytest.fixture(scope="module")
def alone(default_server):
    return asyncio.run(all_alone(default_server))


def test_every_case_alone_gives_the_known_answer(alone):
    for case, (ids, text, last) in zip(CASES, alone, strict=True):
        assert_free_run(case, ids)
        if ids == case["greedy_ids"]:
            assert text == case["text"]
            assert last.finish.reason.name.lower() == case["finish"]
        assert last.usage.prompt_tokens == len(case["prompt_ids"])
        assert last.usage.output_tokens == len(ids)


def test_sixteen_at_once_give_each_case_the_ids_it_gets_alone(default_server, alone):
    together = asyncio.run(all_at_once(default_server))
    assert [(ids, text) for ids, text, _ in together] == [(ids, text) for ids, text, _ in alone]


@pytest.mark.parametrize("budget", [16, 64, 2048])
def test_no_token_budget_changes_a_token(alone, budget):
    with served(budget_tokens=budget) as server:
        together = asyncio.run(all_at_once(server))
    assert [(ids, text) for ids, text, _ in together] == [(ids, text) for ids, text, _ in alone]


async def test_a_seed_gives_the_same_tokens_alone_and_among_fifteen_random_batch_mates(default_server):
    prompt = Chat.user("Write one sentence about the sea.")
    seeded = GenerateOptions(max_tokens=48, temperature=0.9, top_k=40, top_p=0.95, min_p=0.02, seed=1234567890123)
    async with AsyncGenerationClient(default_server.target) as client:
        alone = await ask(client, prompt, seeded)
        mates = [
            ask(client, f"Mate {mate} says", GenerateOptions(max_tokens=20 + 2 * mate, temperature=1.0, seed=mate))
            for mate in range(MATES)
        ]
        among, *_ = await asyncio.gather(ask(client, prompt, seeded), *mates)
        other_seed = await ask(client, prompt, GenerateOptions(max_tokens=48, temperature=0.9, seed=99))
    assert among[0] == alone[0]
    assert other_seed[0] != alone[0]
    assert alone[2].seed == 1234567890123
