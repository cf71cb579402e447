"""The known answers of SmolLM2 through the HTTP front, with OpenAI's own client; the same ones as over gRPC."""

import openai
import pytest

from protos.client.generation_client import GenerationClient
from tests.support.golden import cases
from tests.support.served import served

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
CASES = cases("smollm2_greedy.json")
MODEL = "smollm2-135m-instruct"
MAX_TOKENS = 12


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


def one_of_each_kind():
    return [next(case for case in CASES if case["kind"] == kind) for kind in ("chat", "raw")]


@pytest.mark.parametrize("case", one_of_each_kind(), ids=lambda case: case["kind"])
def test_known_answers_whole_and_streamed(client, grpc, case):
    ids = case["greedy_ids"][:MAX_TOKENS]
    text = grpc.detokenize(ids)
    asked = {"model": MODEL, "temperature": 0, "max_tokens": len(ids)}
    if case["kind"] == "chat":
        asked["messages"] = [{"role": "user", "content": case["prompt"]}]
        whole = client.chat.completions.create(**asked)
        stream = client.chat.completions.create(stream=True, **asked)
        texts = [whole.choices[0].message.content, "".join(part.choices[0].delta.content or "" for part in stream)]
    else:
        asked["prompt"] = case["prompt"]
        whole = client.completions.create(**asked)
        stream = client.completions.create(stream=True, **asked)
        texts = [whole.choices[0].text, "".join(part.choices[0].text for part in stream)]
    assert texts == [text, text]
    assert whole.usage.completion_tokens == len(ids)


def test_prompts_of_one_call_logprobs_and_seeds(client):
    prompts = ["The capital of France is", "One, two, three,"]
    asked = {"model": MODEL, "prompt": prompts, "max_tokens": 8, "seed": 3, "logprobs": 2}
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
        client.completions.create(model=MODEL, prompt="a", max_tokens=10**6)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="a")
