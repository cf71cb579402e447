"""What a caller says reaches the wire, and nothing else does."""

from dataclasses import fields

import numpy as np
import pytest

from protos.client.embed_messages import EmbedOptions, embed_request
from protos.client.generation_client import AsyncGenerationClient, GenerationClient
from protos.client.messages import Chat, GenerateOptions, TokenIds, chunk_from, generation_from
from protos.client.prompt_messages import HiddenStates
from protos.client.request_messages import generate_once_request, generate_request
from protos.forwardplane.v1.generate_pb2 import HIDDEN_STATE_SELECTION_FULL, GenerateChunk, Generation
from protos.wire.errors import InvalidRequest

SAID = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "seed": 7,
    "n": 3,
    "logit_bias": {5: -1.5},
    "allowed_token_ids": (5, 6),
    "banned_token_ids": (7,),
    "max_tokens": 9,
    "min_tokens": 2,
    "stop_strings": ("a",),
    "stop_token_ids": (5,),
    "ignore_eos": True,
    "logprobs": 0,
    "keep_special_tokens": True,
    "echo": True,
    "model": "m",
    "client_tag": "t",
    "cache_salt": "s",
    "priority": 2,
}
OF_PROMPT = {"prompt_logprobs", "prompt_logprobs_start", "hidden_states"}
GRAMMARS = {"json_schema": "{}", "regex": "a+", "ebnf": "start: x", "choice": ("yes", "no")}


def set_fields(message, path=""):
    for field, value in message.ListFields():
        if field.message_type is not None and not field.is_repeated:
            yield from set_fields(value, f"{path}{field.name}.")
        else:
            yield path + field.name, value


def test_each_option_reaches_its_field():
    assert set(SAID) | set(GRAMMARS) | OF_PROMPT == {field.name for field in fields(GenerateOptions)}
    sent = dict(set_fields(generate_request("x", GenerateOptions(**SAID))))
    assert sent.pop("text") == "x"
    assert {
        path.rpartition(".")[2]: tuple(value) if isinstance(SAID[path.rpartition(".")[2]], tuple) else value
        for path, value in sent.items()
    } == SAID


def test_each_grammar_reaches_its_field():
    for name, said in GRAMMARS.items():
        request = generate_request("x", GenerateOptions(**{name: said}))
        assert request.WhichOneof("grammar") == name
        sent = getattr(request, name)
        assert (tuple(sent.texts) if name == "choice" else sent) == said


def test_what_is_asked_of_the_prompt_reaches_its_fields():
    asked = GenerateOptions(prompt_logprobs=5, prompt_logprobs_start=3, hidden_states="full")
    request = generate_request("x", asked)
    assert (request.prompt_logprobs.top, request.prompt_logprobs.start) == (5, 3)
    assert request.hidden_states == HIDDEN_STATE_SELECTION_FULL
    assert not generate_request("x", GenerateOptions()).HasField("prompt_logprobs")
    assert generate_request("x", GenerateOptions(prompt_logprobs=0)).HasField("prompt_logprobs")
    with pytest.raises(InvalidRequest, match="hidden_states is 'all'"):
        generate_request("x", GenerateOptions(hidden_states="all"))


def test_hidden_states_of_both_types_are_read_as_numbers():
    values = np.array([[1.5, -2.0], [0.25, 3.0]], np.float32)
    whole = HiddenStates("float32", 2, 0, values.tobytes())
    half = HiddenStates("bfloat16", 2, 0, (values.view(np.uint32) >> 16).astype("<u2").tobytes())
    assert np.array_equal(whole.array(), values)
    assert np.array_equal(half.array(), values)


def test_an_embedding_asks_for_its_prompt_and_nothing_else():
    sent = embed_request(["a", TokenIds((1, 2))], EmbedOptions(pooling="mean", normalize=False, cache_salt="s"))
    assert [dict(set_fields(request)) for request in sent.requests] == [
        {"text": "a", "cache_salt": "s"},
        {"tokens.ids": [1, 2], "cache_salt": "s"},
    ]
    assert (sent.pooling, sent.normalize) == ("mean", False)


@pytest.mark.parametrize("prompt", ["a text", Chat.user("a text"), TokenIds((1, 2))])
@pytest.mark.parametrize(
    ("request_of", "options"), [(generate_once_request, GenerateOptions()), (embed_request, EmbedOptions())]
)
def test_one_prompt_in_place_of_a_list_is_refused(prompt, request_of, options):
    """Else each character of a text would be a prompt."""
    with pytest.raises(InvalidRequest, match="must be a list of prompts"):
        request_of(prompt, options)
    assert len(request_of([prompt], options).requests) == 1


def test_an_option_that_is_not_said_stays_absent():
    assert dict(set_fields(generate_request("x", GenerateOptions()))) == {"text": "x"}
    assert dict(set_fields(generate_request(TokenIds((1, 2)), GenerateOptions()))) == {"tokens.ids": [1, 2]}
    (path,) = dict(set_fields(generate_request(Chat.user("hi"), GenerateOptions())))
    assert path == "chat.messages"


def test_the_prompts_text_is_told_from_an_empty_one():
    for read, message in ((chunk_from, GenerateChunk), (generation_from, Generation)):
        finish = {} if message is GenerateChunk else {"finish": {"reason": 1}}
        assert read(message(prompt_text="", **finish)).prompt_text == ""
        assert read(message(**finish)).prompt_text is None


@pytest.mark.parametrize("request_id", [5, "\ud800"])
async def test_both_clients_refuse_an_id_that_is_no_text_by_its_field(request_id):
    with GenerationClient("127.0.0.1:9") as client, pytest.raises(InvalidRequest) as refused:
        client.abort(request_id)
    async with AsyncGenerationClient("127.0.0.1:9") as client:
        with pytest.raises(InvalidRequest) as refused_too:
            await client.abort(request_id)
    assert refused.value.field == refused_too.value.field == "request_id"
