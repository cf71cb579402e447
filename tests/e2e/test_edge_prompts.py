"""An edge around what is asked of prompts: told in parts, once, before the first token; embeddings on both doors."""

import base64
import contextlib
from pathlib import Path

import grpc
import numpy as np
import openai
import pytest

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from protos.forwardplane.v1 import generate_pb2 as pb
from protos.forwardplane.v1.bridge_pb2 import CoreModel, StateUse
from protos.service.status import from_rpc_error
from protos.wire.enums import FinishReason, HiddenMode
from protos.wire.errors import EngineError, InvalidRequest, UnsupportedFeature
from tests.support.edge_harness import running_edge

LONG = CoreModel(context_tokens=4096, logits_width=300, max_logprobs=20, serving=True)
UNIT = pytest.approx([0.6, 0.8], abs=1e-6)


@contextlib.asynccontextmanager
async def edge_and_client(folder: Path, *, allowed=HiddenMode.FULL, **options):
    async with (
        running_edge(folder, max_hidden_mode=allowed, **options) as edge,
        AsyncGenerationClient(f"127.0.0.1:{edge.server.port}") as client,
    ):
        yield edge, client


async def collected(client, prompt, **options):
    return [chunk async for chunk in client.stream(prompt, GenerateOptions(**options))]


async def test_a_long_prompt_is_told_in_parts_before_the_first_token(tmp_path):
    async with edge_and_client(tmp_path, model=LONG) as (_, client):
        prompt = TokenIds(tuple(index % 200 for index in range(2500)))
        chunks = await collected(
            client, prompt, prompt_logprobs=3, hidden_states="last", max_tokens=3, echo=True, client_tag="t"
        )
    told = [chunk.prompt for chunk in chunks]
    logprobs = [item for answer in told for item in answer.logprobs]
    assert [item.token_id for item in logprobs] == list(prompt.ids[1:])
    assert [item.logprob for item in logprobs] == [-float(position) for position in range(1, 2500)]
    assert logprobs[-1].top == ((0, -1.0), (1, -2.0), (2, -3.0))
    firsts = [answer.first_pos for answer in told if answer.logprobs]
    assert firsts == [1, 1025, 2049]
    assert sum(answer.hidden_states is not None for answer in told) == 1
    first_token = next(index for index, chunk in enumerate(chunks) if chunk.token_ids)
    assert all(not answer.logprobs for answer in told[first_token + 1 :])
    assert [bool(chunk.request_id) for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert chunks[0].prompt_text is not None
    assert len([token for chunk in chunks for token in chunk.token_ids]) == 3


async def test_a_request_without_output_ends_with_what_was_asked(tmp_path):
    async with edge_and_client(tmp_path) as (edge, client):
        (last,) = await collected(client, "abcd", prompt_logprobs=0, prompt_logprobs_start=2, max_tokens=0)
        assert (last.finish.reason, last.usage.prompt_tokens, last.usage.output_tokens) == (FinishReason.LENGTH, 4, 0)
        assert (last.token_ids, last.text, last.prompt.first_pos, len(last.prompt.logprobs)) == ((), "", 2, 2)
        (whole,) = await client.generate(["abcd"], GenerateOptions(hidden_states="full", max_tokens=0))
        assert whole.prompt.hidden_states.array().tolist() == [[3.0 + ord("a"), 4.0]] * 4
        assert [submit.max_tokens for submit in edge.core.submits] == [0, 0]


async def test_only_the_first_of_several_samples_tells_of_the_prompt(tmp_path):
    async with edge_and_client(tmp_path) as (edge, client):
        chunks = await collected(client, "ab", prompt_logprobs=1, n=3, max_tokens=2, temperature=1.0)
        assert {chunk.sample_index for chunk in chunks if chunk.prompt.logprobs} == {0}
        assert [submit.HasField("prompt_wants") for submit in edge.core.submits] == [True, False, False]


@pytest.mark.parametrize(
    ("allowed", "asked", "is_given"),
    [(HiddenMode.NULL, "last", False), (HiddenMode.LAST, "last", True), (HiddenMode.LAST, "full", False)],
)
async def test_hidden_states_are_given_up_to_what_the_server_allows(tmp_path, allowed, asked, is_given):
    async with edge_and_client(tmp_path, allowed=allowed) as (edge, client):
        if is_given:
            assert (await collected(client, "a", hidden_states=asked, max_tokens=1))[0].prompt.hidden_states
            return
        with pytest.raises(UnsupportedFeature) as caught:
            await collected(client, "a", hidden_states=asked, max_tokens=1)
        assert caught.value.field == "hidden_states"
        assert not edge.core.submits


async def test_a_start_behind_the_prompt_is_refused(tmp_path):
    async with edge_and_client(tmp_path) as (_, client):
        with pytest.raises(InvalidRequest) as caught:
            await collected(client, "abc", prompt_logprobs=0, prompt_logprobs_start=3)
        assert caught.value.field == "prompt_logprobs.start"
        assert "[0, 2]" in caught.value.message


async def test_embeddings_are_pooled_as_asked_and_scaled_unless_not_wanted(tmp_path):
    async with edge_and_client(tmp_path, allowed=HiddenMode.NULL) as (edge, _):
        zero = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=[0]))
        reply = await edge.stub.Embed(pb.EmbedRequest(requests=[zero, zero]))
        assert [list(one.values) for one in reply.embeddings] == [UNIT, UNIT]
        assert [one.usage.prompt_tokens for one in reply.embeddings] == [1, 1]
        raw = await edge.stub.Embed(pb.EmbedRequest(requests=[zero], pooling="mean", normalize=False))
        assert list(raw.embeddings[0].values) == [3, 4]
        uses = [submit.prompt_wants.states for submit in edge.core.submits]
        assert uses == [StateUse.STATE_USE_LAST, StateUse.STATE_USE_LAST, StateUse.STATE_USE_MEAN]
        assert not edge.core.streams
        assert edge.link.num_streams == 0


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({}, "requests"),
        ({"requests": [pb.GenerateRequest(text="a")], "pooling": "max"}, "pooling"),
        ({"requests": [pb.GenerateRequest(text="a"), pb.GenerateRequest()]}, "requests[1].prompt"),
        ({"requests": [pb.GenerateRequest(text="a", logprobs=1)]}, "requests[0].logprobs"),
        ({"requests": [pb.GenerateRequest(text="a", stop={"max_tokens": 3})]}, "requests[0].stop"),
        ({"requests": [pb.GenerateRequest(text="a", hidden_states=1)]}, "requests[0].hidden_states"),
        ({"requests": [pb.GenerateRequest(text="a")] * 65}, "requests"),
    ],
)
async def test_what_is_no_embedding_is_refused_by_name(tmp_path, asked, field):
    async with edge_and_client(tmp_path) as (edge, _):
        request = pb.EmbedRequest(**asked)
        with pytest.raises(EngineError) as caught:
            await _embed(edge, request)
        assert caught.value.field == field
        assert not edge.core.submits


async def _embed(edge, request):
    try:
        return await edge.stub.Embed(request)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


@contextlib.asynccontextmanager
async def openai_client(folder: Path):
    async with (
        running_edge(folder, http_limits={}) as edge,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{edge.http.port}/v1", api_key="none", max_retries=0) as client,
    ):
        yield edge, client


@pytest.mark.parametrize(("value", "count"), [("ab", 1), (["a", "b"], 2), ([97, 98], 1), ([[97, 98], [99]], 2)])
async def test_openais_client_gets_a_vector_for_each_input(tmp_path, value, count):
    async with openai_client(tmp_path) as (edge, client):
        made = await client.embeddings.create(model="tiny", input=value)
        plain = await client.embeddings.create(model="tiny", input=value, encoding_format="float", user="u")
        assert len(made.data) == count
        assert [one.index for one in made.data] == list(range(count))
        assert np.allclose([one.embedding for one in made.data], [one.embedding for one in plain.data])
        assert np.allclose(np.linalg.norm([one.embedding for one in made.data], axis=1), 1)
        assert (made.model, made.object, made.data[0].object) == ("tiny", "list", "embedding")
        assert made.usage.prompt_tokens == made.usage.total_tokens > 0
        mean = await client.embeddings.create(
            model="tiny", input=value, extra_body={"pooling": "mean", "normalize": False}
        )
        assert mean.data[0].embedding[1] == 4
        assert edge.core.submits[-1].prompt_wants.states == StateUse.STATE_USE_MEAN


async def test_base64_is_float32_little_endian(tmp_path):
    async with openai_client(tmp_path) as (_, client):
        raw = await client.embeddings.with_raw_response.create(
            model="tiny", input=[0], encoding_format="base64", extra_body={"normalize": False}
        )
        text = raw.http_response.json()["data"][0]["embedding"]
        assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == [3, 4]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": [[1], [5000]]}, "input[1][0]"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "extra_body": {"pooling": "max"}}, "pooling"),
        ({"input": "a", "extra_body": {"color": 1}}, "color"),
    ],
)
async def test_openais_client_hears_which_field_is_refused(tmp_path, fields, param):
    async with openai_client(tmp_path) as (edge, client):
        with pytest.raises(openai.APIStatusError) as caught:
            await client.embeddings.create(model="tiny", **fields)
        assert caught.value.param == param
        assert not edge.core.submits
