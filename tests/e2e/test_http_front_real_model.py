"""The known answers of SmolLM2 through the HTTP front, with OpenAI's own client; the same ones as over gRPC."""

import openai
import pytest

from protos.client.generation_client import GenerationClient
from protos.client.messages import Chat, GenerateOptions
from tests.support.golden import cases
from tests.support.served import served

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
CASES = cases("smollm2_greedy.json")


@pytest.fixture(scope="module")
def server():
    with served() as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture
def grpc(server):
    with GenerationClient(server.target) as opened:
        yield opened


def greedy(case):
    return {"model": "smollm2-135m-instruct", "temperature": 0, "max_tokens": len(case["greedy_ids"])}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"][:20])
def test_known_answers_whole_and_streamed(client, grpc, case):
    options = GenerateOptions(max_tokens=len(case["greedy_ids"]), temperature=0.0)
    if case["kind"] == "chat":
        (expected,) = grpc.generate([Chat.user(case["prompt"])], options)
        messages = [{"role": "user", "content": case["prompt"]}]
        whole = client.chat.completions.create(messages=messages, **greedy(case))
        stream = client.chat.completions.create(messages=messages, stream=True, **greedy(case))
        texts = [whole.choices[0].message.content, "".join(part.choices[0].delta.content or "" for part in stream)]
    else:
        (expected,) = grpc.generate([case["prompt"]], options)
        whole = client.completions.create(prompt=case["prompt"], **greedy(case))
        stream = client.completions.create(prompt=case["prompt"], stream=True, **greedy(case))
        texts = [whole.choices[0].text, "".join(part.choices[0].text for part in stream)]
    assert list(expected.token_ids) == case["greedy_ids"]
    assert texts == [expected.text, expected.text]
    assert whole.usage.completion_tokens == len(case["greedy_ids"])
    assert whole.usage.prompt_tokens == expected.usage.prompt_tokens


def test_prompts_of_one_call_logprobs_and_seeds(client):
    prompts = ["The capital of France is", "One, two, three,"]
    asked = {"model": "smollm2-135m-instruct", "prompt": prompts, "max_tokens": 8, "seed": 3, "logprobs": 2}
    first, again = client.completions.create(**asked), client.completions.create(**asked)
    assert [choice.text for choice in first.choices] == [choice.text for choice in again.choices]
    assert first.system_fingerprint == again.system_fingerprint
    for choice in first.choices:
        found = choice.logprobs
        assert "".join(found.tokens) == choice.text
        assert all(len(best) >= 2 for best in found.top_logprobs)
        assert all(logprob <= 0 for logprob in found.token_logprobs)
        assert [
            choice.text[offset:].startswith(name) for offset, name in zip(found.text_offset, found.tokens, strict=True)
        ]


def test_what_the_model_does_not_fit_is_refused(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smollm2-135m-instruct", prompt="a", max_tokens=10**6)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="a")
