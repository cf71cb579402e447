"""Prompt log-probabilities and embeddings of the real model over real processes: known answers, equal bits."""

import asyncio

import numpy as np
import openai
import pytest
import torch

from protos.client.embed_messages import EmbedOptions
from protos.client.generation_client import AsyncGenerationClient, GenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from protos.wire.enums import FinishReason
from protos.wire.errors import UnsupportedFeature
from tests.support.forwards import ForwardDriver, make_batch
from tests.support.golden import cases
from tests.support.model import model_folder
from tests.support.served import served

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

CASES = cases("smollm2_greedy.json")
TOLERANCE = 0.002
INPUTS = [TokenIds(tuple(CASES[index]["prompt_ids"])) for index in (0, 3, 5)]
ONE_SERVER = pytest.mark.parametrize("server", [64], indirect=True)
SCORING = GenerateOptions(max_tokens=0, prompt_logprobs=5)


@pytest.fixture(scope="module", params=[16, 64, 512])
def server(request):
    with served(budget_tokens=request.param) as running:
        yield running


def forced(case):
    return TokenIds((*case["prompt_ids"], *case["greedy_ids"]))


def assert_known(case, answer):
    first = len(case["prompt_ids"])
    for step, best in enumerate(case["top5_logprobs"]):
        place = first + step - answer.first_pos
        if place < 0 or place >= len(answer.logprobs):
            continue
        found = answer.logprobs[place]
        assert found.token_id == case["greedy_ids"][step]
        assert np.allclose([value for _, value in found.top], [value for _, value in best], atol=TOLERANCE)


async def all_at_once(target, prompts, options):
    async with AsyncGenerationClient(target) as client:
        return await asyncio.gather(*(client.generate([prompt], options) for prompt in prompts))


def test_the_forced_answers_at_every_position_in_chunks_together_alone_and_behind_a_prefix(server):
    chosen = CASES if server.options.budget_tokens == 512 else CASES[:3]
    together = [made for (made,) in asyncio.run(all_at_once(server.target, [forced(case) for case in chosen], SCORING))]
    for case, made in zip(chosen, together, strict=True):
        assert_known(case, made.prompt)
        assert len(made.prompt.logprobs) == len(forced(case).ids) - 1
        assert (made.finish.reason, made.usage.output_tokens, made.token_ids) == (FinishReason.LENGTH, 0, ())
    with GenerationClient(server.target) as client:
        case, whole = CASES[0], together[0]
        (alone,) = client.generate([forced(case)], SCORING)
        assert alone.prompt == whole.prompt
        start = len(case["prompt_ids"])
        later = GenerateOptions(max_tokens=0, prompt_logprobs=5, prompt_logprobs_start=start)
        (offset,) = client.generate([forced(case)], later)
        assert 0 < offset.usage.cached_tokens <= start - 1
        assert (offset.prompt.first_pos, offset.prompt.logprobs) == (start, whole.prompt.logprobs[start - 1 :])
        client.flush_cache()
        (cold,) = client.generate([forced(case)], later)
        assert cold.usage.cached_tokens == 0
        assert cold.prompt == offset.prompt


@ONE_SERVER
def test_output_log_probabilities_are_raw_and_never_doubled_with_penalties_seeds_and_among_mates(server):
    case = CASES[2]
    plain = GenerateOptions(max_tokens=12, seed=3, temperature=0.9, top_k=40, logprobs=20)
    ruled = GenerateOptions(
        max_tokens=12, seed=3, temperature=0.9, logprobs=20, repetition_penalty=1.3, logit_bias={17: 5.0}
    )
    prompt = TokenIds(tuple(case["prompt_ids"]))
    for options in (plain, ruled):
        together = [made for (made,) in asyncio.run(all_at_once(server.target, [prompt] * 3, options))]
        assert [made.logprobs for made in together[1:]] == [together[0].logprobs] * 2
        made = together[0]
        assert [item.token_id for item in made.logprobs] == list(made.token_ids)
        assert [len(item.top) for item in made.logprobs] == [20] * len(made.token_ids)
        with GenerationClient(server.target) as client:
            scoring = GenerateOptions(max_tokens=0, prompt_logprobs=20, prompt_logprobs_start=len(prompt.ids))
            (scored,) = client.generate([TokenIds((*prompt.ids, *made.token_ids))], scoring)
        assert scored.prompt.logprobs == made.logprobs


@pytest.fixture(scope="module")
def known_states():
    """Of the model run directly, each prompt as one piece."""
    torch.set_num_threads(1)
    driver = ForwardDriver(model_folder(), num_pages=64)
    return [_states(driver, prompt.ids) for prompt in INPUTS]


def _states(driver, ids):
    row = driver.row(ids)
    batch = make_batch([row], [len(ids)], translator=driver.translator)
    with torch.inference_mode(), driver.context.bind(batch):
        states = driver.loaded.model.hidden_states(batch.input_ids, batch.positions, driver.context)
    driver.release(row)
    return states.numpy()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_models_states_in_any_chunks_among_mates_and_with_or_without_cache(
    server, known_states, pooling
):
    options = EmbedOptions(pooling=pooling, normalize=False)
    inputs = INPUTS if server.options.budget_tokens == 512 else INPUTS[:2]  # the third has a thousand tokens
    with GenerationClient(server.target) as client:
        together = [one.values for one in client.embed(inputs, options)]
        (again,) = client.embed(INPUTS[1:2], options)
        client.flush_cache()
        (cold,) = client.embed(INPUTS[1:2], options)
        unit = np.array(client.embed(inputs[:1], EmbedOptions(pooling=pooling))[0].values)
    assert together[1] == again.values == cold.values
    assert (again.usage.cached_tokens > 0, cold.usage.cached_tokens) == (pooling == "last", 0)
    for values, states in zip(together, known_states[: len(inputs)], strict=True):
        expected = states[-1] if pooling == "last" else states.astype(np.float64).mean(0).astype(np.float32)
        assert np.array_equal(np.array(values, np.float32), expected)
    assert np.allclose(np.linalg.norm(unit), 1, atol=1e-6)
    assert np.allclose(unit, known_states[0][-1] / np.linalg.norm(known_states[0][-1])) or pooling == "mean"


@ONE_SERVER
def test_openais_client_gets_the_same_vectors(server):
    client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)
    made = client.embeddings.create(model="smollm2-135m-instruct", input=[list(prompt.ids) for prompt in INPUTS[:2]])
    with GenerationClient(server.target) as direct:
        expected = [one.values for one in direct.embed(INPUTS[:2])]
    assert np.array_equal(np.array([one.embedding for one in made.data], np.float32), np.array(expected, np.float32))
    assert made.usage.prompt_tokens == sum(len(prompt.ids) for prompt in INPUTS[:2])
    client.close()


@ONE_SERVER
def test_raw_hidden_states_are_off_unless_the_server_gives_them(server):
    with GenerationClient(server.target) as client, pytest.raises(UnsupportedFeature) as caught:
        client.generate(["a"], GenerateOptions(hidden_states="last", max_tokens=0))
    assert caught.value.field == "requests[0].hidden_states"


def test_full_hidden_states_are_the_models(known_states):
    with served(budget_tokens=16, max_hidden_mode="full") as server, GenerationClient(server.target) as client:
        options = GenerateOptions(hidden_states="full", max_tokens=2, temperature=0)
        chunks = list(client.stream(INPUTS[1], options))
    given = [chunk.prompt.hidden_states for chunk in chunks if chunk.prompt.hidden_states is not None]
    assert len(given) == 1
    assert np.array_equal(given[0].array(), known_states[1])
    assert sum(len(chunk.token_ids) for chunk in chunks) == 2
