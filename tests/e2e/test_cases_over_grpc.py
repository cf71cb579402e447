"""The known answers of SmolLM2 over gRPC: alone and cold; sixteen at once with budgets 16 and 64; as four samples
of each prompt, from a warm cache; and retracted, with a budget of 2048."""

import asyncio
import dataclasses

import pytest

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import Chat, GenerateOptions, TokenIds
from tests.support.golden import assert_free_run, cases
from tests.support.served import Served, scrape, served, total

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
    """One after the other, each with a cold cache."""
    found = []
    async with AsyncGenerationClient(server.target) as client:
        for case in CASES:
            await client.flush_cache()
            found.append(await ask(client, prompt_of(case), options_of(case)))
    return found


def mates():
    """Random ones, which make sixteen with the cases."""
    options = [GenerateOptions(max_tokens=12, seed=mate, temperature=1.0) for mate in range(16 - len(CASES))]
    return [(TokenIds((5 + mate, 17, 300 + mate)), own) for mate, own in enumerate(options)]


async def all_at_once(server: Served, most: int):
    """At most so many tokens of each case."""
    async with AsyncGenerationClient(server.target) as client:
        shortened = [{**case, "greedy_ids": case["greedy_ids"][:most]} for case in CASES]
        tasks = [ask(client, prompt_of(case), options_of(case)) for case in shortened]
        tasks += [ask(client, *mate) for mate in mates()]
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
        assert last.usage.cached_tokens == 0
        assert last.usage.output_tokens == len(ids)


async def test_four_samples_of_each_case_from_a_warm_cache_are_what_it_gets_alone(default_server, alone):
    """All at once, and beside random ones."""
    async with AsyncGenerationClient(default_server.target) as client:
        await asyncio.gather(*(ask(client, prompt_of(case), GenerateOptions(max_tokens=1)) for case in CASES))
        others = asyncio.gather(*(ask(client, *mate) for mate in mates()))
        four_of_each = await asyncio.gather(
            *(client.generate([prompt_of(case)], options_of(case, n=4)) for case in CASES)
        )
        await others
    for case, (ids, text, _), four in zip(CASES, alone, four_of_each, strict=True):
        assert [(list(sample.token_ids), sample.text) for sample in four] == [(ids, text)] * 4
        assert [sample.sample_index for sample in four] == [0, 1, 2, 3]
        cached = (len(case["prompt_ids"]) - 1) // 16 * 16
        # The prompt is counted with the first sample only.
        assert [sample.usage.cached_tokens for sample in four] == [cached, 0, 0, 0]


@pytest.mark.parametrize(("budget", "most"), [(16, 48), (64, 16)])
def test_no_token_budget_changes_a_token_of_sixteen_at_once(alone, budget, most):
    """The budget is about prompts: tokens far behind them are compared once; `test_scores_over_grpc` forces them."""
    with served(budget_tokens=budget) as server:
        together = asyncio.run(all_at_once(server, most))
    assert [ids for ids, _, _ in together] == [ids[:most] for ids, _, _ in alone]


async def test_a_seed_gives_the_same_tokens_alone_and_among_fifteen_random_batch_mates(default_server):
    prompt = Chat.user("Write one sentence about the sea.")
    seeded = GenerateOptions(max_tokens=32, temperature=0.9, top_k=40, top_p=0.95, min_p=0.02, seed=1234567890123)
    async with AsyncGenerationClient(default_server.target) as client:
        alone = await ask(client, prompt, seeded)
        mates = [
            ask(client, f"Mate {mate} says", GenerateOptions(max_tokens=8 + 2 * mate, temperature=1.0, seed=mate))
            for mate in range(MATES)
        ]
        among, *_ = await asyncio.gather(ask(client, prompt, seeded), *mates)
        other_seed = await ask(client, prompt, dataclasses.replace(seeded, max_tokens=12, seed=99))
    assert among[0] == alone[0]
    assert other_seed[0] != alone[0][:12]
    assert alone[2].seed == 1234567890123


async def test_seeded_sample_i_of_each_case_does_not_depend_on_n(default_server):
    """Callers cannot ask for sample i alone: it is the same among four as among fewer."""

    def seeded(n):
        return GenerateOptions(max_tokens=6, temperature=1.0, top_p=0.95, seed=4711, n=n)

    async with AsyncGenerationClient(default_server.target) as client:

        async def samples(case, n):
            return [list(sample.token_ids) for sample in await client.generate([prompt_of(case)], seeded(n))]

        async def check(case):
            among = await asyncio.gather(*(samples(case, n) for n in (1, 2, 4)))
            assert [found == among[-1][: len(found)] for found in among] == [True] * 3
            assert len(set(map(tuple, among[-1]))) > 1

        await asyncio.gather(*map(check, CASES))


PAGES = 73
"""They take the longest case and hardly more: beside it there is no room for all other cases at once."""
STEPS = 20
NO_RESERVE = (
    *("--first-new-token-ratio", "1", "--least-new-token-ratio", "0"),
    *("--new-token-ratio-decay-steps", str(STEPS)),
)
"""After so many decode steps requests are admitted without a thought for what will come."""


def test_every_case_gets_the_ids_it_gets_alone_from_a_pool_so_small_that_requests_are_retracted(alone):
    small = ("--num-pages", str(PAGES))
    with served(budget_tokens=2048, worker_flags=small, scheduler_flags=NO_RESERVE) as server:
        short = asyncio.run(beside_the_longest(server))
        after_short = retractions_of(server)
        (long,) = asyncio.run(beside_growing_ones(server))
        after_long = retractions_of(server)
    print(f"\n{after_short:.0f} retractions among the short cases, {after_long - after_short:.0f} beside the long one")
    assert 0 < after_short < after_long
    together = [*short[:LONGEST], long, *short[LONGEST:]]
    assert [(ids, text) for ids, text, _ in together] == [(ids, text) for ids, text, _ in alone]


LONGEST = max(range(len(CASES)), key=lambda index: len(CASES[index]["prompt_ids"]))


def retractions_of(server: Served) -> float:
    return total(scrape(server.options.ports.metrics_port), "forwardplane_scheduler_retractions_total")


async def beside_the_longest(server: Served):
    """The other cases, all at once, in what the longest one leaves of the pool; it is older and grows."""
    grow = GenerateOptions(max_tokens=60, temperature=0.0, ignore_eos=True)
    async with AsyncGenerationClient(server.target) as client:
        stream = client.stream(prompt_of(CASES[LONGEST]), grow)
        await begun(stream)
        rest = asyncio.create_task(drained(stream))
        cases = [case for index, case in enumerate(CASES) if index != LONGEST]
        found = await asyncio.gather(*(ask(client, prompt_of(case), options_of(case)) for case in cases))
        await rest
    return found


async def beside_growing_ones(server: Served):
    """The longest case, behind four older requests that grow into its pages."""
    grow = GenerateOptions(max_tokens=60, temperature=0.0, ignore_eos=True)
    async with AsyncGenerationClient(server.target) as client:
        streams = [client.stream(TokenIds((7 + mate, 11)), grow) for mate in range(4)]
        await asyncio.gather(*(begun(stream) for stream in streams))
        rest = [asyncio.create_task(drained(stream)) for stream in streams]
        found = await ask(client, prompt_of(CASES[LONGEST]), options_of(CASES[LONGEST]))
        await asyncio.gather(*rest)
    return [found]


async def begun(stream) -> None:
    """Until it has decoded enough."""
    tokens = 0
    while tokens <= STEPS + 2:
        tokens += len((await anext(stream)).token_ids)


async def drained(stream) -> None:
    async for _ in stream:
        pass
