"""The known answers of SmolLM2 through the HTTP front, with OpenAI's own client; the same ones as over gRPC."""

import json
import re

import openai
import pytest

from protos.client.generation_client import GenerationClient
from protos.client.messages import Chat, GenerateOptions
from tests.support.golden import cases
from tests.support.served import served

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
CASES = cases("smollm2_greedy.json")
MODEL = "smollm2-135m-instruct"
MAX_TOKENS = 12
QUESTION = "Which of the seven seas is the largest one, and how did it get the name that it has today?"


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


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompts_scores_are_those_of_the_other_door(client, grpc, max_tokens):
    ids = grpc.tokenize(QUESTION)
    options = GenerateOptions(max_tokens=max_tokens, temperature=0.0, prompt_logprobs=2, logprobs=2)
    (known,) = grpc.generate([QUESTION], options)
    asked = {"model": MODEL, "prompt": QUESTION, "temperature": 0, "logprobs": 2, "echo": True}
    (choice,) = client.completions.create(max_tokens=max_tokens, **asked).choices
    found = choice.logprobs
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    assert found.token_logprobs[1 : len(ids)] == pytest.approx([item.logprob for item in known.prompt.logprobs])
    assert found.token_logprobs[len(ids) :] == pytest.approx([item.logprob for item in known.logprobs])
    assert "".join(found.tokens).removesuffix("<|im_end|>") == choice.text == QUESTION + known.text
    placed = [pair for pair in zip(found.text_offset, found.tokens, strict=True) if pair[1] != "<|im_end|>"]
    assert all(choice.text[offset:].startswith(name) for offset, name in placed)
    assert all(len(best) >= 2 for best in found.top_logprobs[1:])


def test_samples_are_those_of_the_other_door_and_count_their_prompt_once(client, grpc):
    options = GenerateOptions(max_tokens=6, temperature=1.0, seed=5, n=4)
    samples = grpc.generate([Chat.user(QUESTION)], options)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
    asked |= {"max_tokens": 6, "temperature": 1.0, "seed": 5, "n": 4}
    whole = client.chat.completions.create(**asked)
    parts = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
    streamed = [
        "".join(choice.delta.content or "" for part in parts for choice in part.choices if choice.index == index)
        for index in range(4)
    ]
    texts = [sample.text for sample in samples]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.message.content for choice in whole.choices] == streamed == texts
    assert len(set(texts)) > 1
    usages = [whole.usage, parts[-1].usage]
    assert {usage.prompt_tokens for usage in usages} == {samples[0].usage.prompt_tokens}
    assert {usage.completion_tokens for usage in usages} == {sum(sample.usage.output_tokens for sample in samples)}
    assert all(0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens for usage in usages)


def test_outputs_match_what_was_asked_whole_and_streamed(client):
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    schema["additionalProperties"] = False
    as_schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "How old is Ann?"}], "max_tokens": 40, "seed": 1}
    whole = client.chat.completions.create(response_format=as_schema, **asked)
    stream = client.chat.completions.create(response_format=as_schema, stream=True, **asked)
    text = "".join(part.choices[0].delta.content or "" for part in stream)
    assert isinstance(json.loads(text)["age"], int)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (text, "stop")
    made = client.completions.create(
        model=MODEL, prompt="A time:", max_tokens=12, extra_body={"structured_outputs": {"regex": "[0-9]{2}:[0-9]{2}"}}
    )
    assert re.fullmatch("[0-9]{2}:[0-9]{2}", made.choices[0].text)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(extra_body={"structured_outputs": {"grammar": "nope"}}, **asked)
    assert caught.value.param == "structured_outputs.grammar"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_string_inside_a_known_answer_cuts_it_there(client, grpc, is_streamed):
    case = next(case for case in CASES if case["kind"] == "raw")
    text = grpc.detokenize(case["greedy_ids"][:MAX_TOKENS])
    middle = text[len(text) // 2 :][:3]
    asked = {"model": MODEL, "prompt": case["prompt"], "max_tokens": MAX_TOKENS, "temperature": 0, "echo": True}
    made = client.completions.create(stop=["never there", middle, middle + "!"], stream=is_streamed, **asked)
    parts = list(made) if is_streamed else [made]
    assert "".join(part.choices[0].text for part in parts) == case["prompt"] + text[: text.index(middle)]
    assert (parts[-1].choices[0].finish_reason, parts[-1].choices[0].stop_reason) == ("stop", middle)


def test_bias_and_lists_decide_what_comes(client, grpc):
    wanted, other = grpc.tokenize(" yes")[0], grpc.tokenize(" no")[0]
    asked = {"model": MODEL, "prompt": "Is it so?", "max_tokens": 3, "temperature": 0}
    biased = client.completions.create(logit_bias={str(wanted): 100}, **asked)
    listed = client.completions.create(extra_body={"allowed_token_ids": [other]}, **asked)
    assert (biased.choices[0].text, listed.choices[0].text) == (" yes" * 3, " no" * 3)


def test_what_the_model_does_not_fit_is_refused(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="a", max_tokens=10**6)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="a")
