"""The known answers of SmolLM2 over gRPC: alone, with 16 at once, with budgets 16, 64 and 2048, as four samples of one
prompt, and retracted."""

import asyncio

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


async def test_four_greedy_samples_of_each_case_are_what_it_gets_alone(default_server, alone):
    async with AsyncGenerationClient(default_server.target) as client:
        four_of_each = await asyncio.gather(
            *(client.generate([prompt_of(case)], options_of(case, n=4)) for case in CASES)
        )
    for (ids, text, _), four in zip(alone, four_of_each, strict=True):
        assert [(list(sample.token_ids), sample.text) for sample in four] == [(ids, text)] * 4
        assert [sample.sample_index for sample in four] == [0, 1, 2, 3]


async def test_seeded_sample_i_of_each_case_does_not_depend_on_n(default_server):
    """Callers cannot ask for sample i alone: it is the same among four as among i + 1."""

    def seeded(n):
        return GenerateOptions(max_tokens=8, temperature=1.0, top_p=0.95, seed=4711, n=n)

    async with AsyncGenerationClient(default_server.target) as client:

        async def samples(case, n):
            return [list(sample.token_ids) for sample in await client.generate([prompt_of(case)], seeded(n))]

        for case in CASES:
            among = await asyncio.gather(*(samples(case, n) for n in (1, 2, 3, 4)))
            assert [found == among[-1][: len(found)] for found in among] == [True] * 4
            assert len(set(map(tuple, among[-1]))) > 1


PAGES, HOG_PAGES = 73, 58
"""The first takes the longest case and hardly more; the second leaves no room for all other cases at once."""
STEPS = 20
NO_RESERVE = (
    *("--first-new-token-ratio", "1", "--least-new-token-ratio", "0"),
    *("--new-token-ratio-decay-steps", str(STEPS)),
)
"""After so many decode steps requests are admitted without a thought for what will come."""


def test_every_case_gets_the_ids_it_gets_alone_from_a_pool_so_small_that_requests_are_retracted(alone):
    with served(worker_flags=("--num-pages", str(PAGES)), scheduler_flags=NO_RESERVE) as server:
        short = asyncio.run(beside_a_hog(server))
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


async def beside_a_hog(server: Served):
    """The short cases, all at once, in what an older request leaves of the pool."""
    hog = TokenIds(tuple(100 + (37 * position) % 4000 for position in range(16 * HOG_PAGES - 8)))
    async with AsyncGenerationClient(server.target) as client:
        stream = client.stream(hog, GenerateOptions(max_tokens=60, temperature=0.0, ignore_eos=True))
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
