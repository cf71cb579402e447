"""The HTTP front as OpenAI's own client sees it: real HTTP on loopback, a real bridge, a made-up core."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import openai
import pytest

from protos.forwardplane.v1.bridge_pb2 import CoreToEdge, StreamError, SubmitStream
from protos.forwardplane.v1.sampling_pb2 import FinishReason
from scheduler_svc.text.grammar_checker import GrammarChecker
from scheduler_svc.text.grammar_messages import Greeting
from tests.support.edge_harness import CHATML, Edge, running_edge
from tests.support.tiny_tokenizer import EOS, byte_level_tokenizer, write_tokenizer
from tests.support.waiting import until

SMILE = "🙂".encode()
HELLO = [{"role": "user", "content": "hi"}]


@contextlib.asynccontextmanager
async def front(folder: Path, **options: object) -> AsyncIterator[tuple[Edge, openai.AsyncOpenAI]]:
    limits = options.pop("http_limits", {})
    async with running_edge(folder, **{"template": CHATML, **options}, http_limits=limits) as edge:
        url = f"http://127.0.0.1:{edge.http.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
            yield edge, client


async def test_a_chat_from_request_to_reply(tmp_path: Path) -> None:
    async with front(tmp_path, script=lambda _: list(b"Hello!")) as (edge, client):
        made = await client.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
            ],
            max_completion_tokens=20,
            temperature=0.5,
            top_p=0.25,
            seed=-1,
            stop="zz",
            user="me",
            extra_body={"top_k": 7, "min_p": 0.125, "min_tokens": 2, "stop_token_ids": [3], "ignore_eos": True},
        )

        (submit,) = edge.core.submits
        prompt = bytes(np.frombuffer(submit.prompt_ids, "<i4").astype(np.uint8)).decode("utf-8", "replace")
        assert edge.core.submits[0].max_tokens == 20
        assert (submit.sampling.temperature, submit.sampling.top_p, submit.sampling.top_k) == (0.5, 0.25, 7)
        assert (submit.sampling.min_p, submit.sampling.seed, submit.min_tokens) == (0.125, (1 << 64) - 1, 2)
        assert np.frombuffer(submit.stop_token_ids, "<u4").tolist() == [3]
        assert "brief" in prompt.replace("�", "")
        assert made.id == f"chatcmpl-{submit.request_id}"
        assert (made.object, made.model) == ("chat.completion", "tiny")
        assert abs(made.created - time.time()) < 60
        assert made.system_fingerprint == "fp-float32-reproducible"
        (choice,) = made.choices
        assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", "Hello!")
        assert (choice.finish_reason, choice.logprobs, choice.stop_reason) == ("length", None, None)
        assert made.usage.prompt_tokens == len(submit.prompt_ids) // 4
        assert (made.usage.completion_tokens, made.usage.prompt_tokens_details.cached_tokens) == (6, 1)
        assert made.usage.total_tokens == made.usage.prompt_tokens + 6
        assert edge.metric("requests_total", method="/v1/chat/completions", code="OK") == 1
        assert edge.metric("request_duration_seconds_count") == 1
        assert edge.metric("request_output_tokens_sum") == 6
        assert edge.metric("http_open_calls") == 0


async def test_defaults_are_those_of_the_grpc_door(tmp_path: Path) -> None:
    async with front(tmp_path) as (edge, client):
        await client.completions.create(model="tiny", prompt="abc")
        (submit,) = edge.core.submits
        assert (round(submit.sampling.temperature, 3), round(submit.sampling.top_p, 3)) == (0.7, 0.9)
        assert (submit.max_tokens, submit.output_logprobs) == (125, False)
        assert 598_000 < submit.deadline_ms <= 600_000
        assert submit.sampling.seed != 0


async def test_a_streamed_chat(tmp_path: Path) -> None:
    script = [97, *SMILE, 98, *SMILE[:3]]
    async with front(tmp_path, script=lambda _: script, step_s=0.005) as (edge, client):
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        events = [event async for event in stream]

        *chunks, last = events
        assert len({event.id for event in events}) == 1
        assert all(event.object == "chat.completion.chunk" for event in events)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert not any(chunk.choices[0].delta.role for chunk in chunks[1:])
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(texts) == "a🙂b�"
        assert not any("�" in text for text in texts[:-2])
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert len(chunks) > 3
        assert all(chunk.usage is None for chunk in chunks)
        assert last.choices == []
        assert last.usage.completion_tokens == len(script)
        assert edge.metric("time_to_first_token_seconds_count") == 1
        assert edge.metric("requests_total", method="/v1/chat/completions", code="OK") == 1
        assert edge.core.cancels == []


async def test_usage_is_not_streamed_unasked(tmp_path: Path) -> None:
    async with front(tmp_path) as (_, client):
        stream = await client.completions.create(model="tiny", prompt="abc", max_tokens=3, stream=True)
        events = [event async for event in stream]
        assert all(event.choices and event.usage is None for event in events)
        assert "".join(event.choices[0].text for event in events) == "ijk"
        assert events[-1].choices[0].finish_reason == "length"


async def test_a_stop_string_ends_it_here_and_in_the_core(tmp_path: Path) -> None:
    async with front(tmp_path, script=lambda _: list(b"one two END three END") * 5, step_s=0.005) as (edge, client):
        for is_streamed in (False, True):
            made = await client.completions.create(
                model="tiny", prompt="abc", stop=["three END", "END", "xyz"], stream=is_streamed
            )
            parts = [event async for event in made] if is_streamed else [made]
            assert "".join(part.choices[0].text for part in parts) == "one two "
            assert (parts[-1].choices[0].finish_reason, parts[-1].choices[0].stop_reason) == ("stop", "END")
        await until(lambda: len(edge.core.cancels) == 2)
        assert edge.core.cancels[0].reason == FinishReason.FINISH_REASON_STOP


async def test_the_end_of_sequence_is_counted_and_has_no_text(tmp_path: Path) -> None:
    async with front(tmp_path) as (edge, client):
        edge.core.script = lambda _: [97, edge.eos_id - 1, edge.eos_id, 98]
        for skip, text in ((True, "a"), (False, "a<|im_start|>")):
            made = await client.completions.create(model="tiny", prompt="abc", extra_body={"skip_special_tokens": skip})
            assert made.choices[0].text == text
            assert made.choices[0].stop_reason == edge.eos_id
            assert made.usage.completion_tokens == 3


async def test_several_prompts_of_text_and_ids(tmp_path: Path) -> None:
    async with front(tmp_path) as (edge, client):
        prompts = ["a", "b", "c"]
        whole = await client.completions.create(model="tiny", prompt=prompts, max_tokens=4)
        stream = await client.completions.create(
            model="tiny", prompt=[[97], [98], [99]], max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
        events = [event async for event in stream]
        texts = ["", "", ""]
        for event in events[:-1]:
            (choice,) = event.choices
            texts[choice.index] += choice.text
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        assert [choice.text for choice in whole.choices] == texts == ["tuvw", "uvwx", "vwxy"]
        assert whole.usage.prompt_tokens == events[-1].usage.prompt_tokens == 3
        assert whole.usage.completion_tokens == events[-1].usage.completion_tokens == 12
        one = await client.completions.create(model="tiny", prompt=[97, 98], max_tokens=1)
        assert (len(one.choices), one.usage.prompt_tokens) == (1, 2)
        assert len({submit.request_id for submit in edge.core.submits}) == 7


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_samples_of_each_prompt_are_choices_by_index(tmp_path: Path, is_streamed: bool) -> None:
    def by_sample(submit: SubmitStream) -> list[int]:
        first, *_ = np.frombuffer(submit.prompt_ids, "<i4").tolist()
        return [first, 48 + submit.sampling.sample_index]

    async with front(tmp_path, script=by_sample) as (edge, client):
        options = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
        made = await client.completions.create(model="tiny", prompt=["a", "b"], n=3, best_of=3, logprobs=0, **options)
        parts = [part async for part in made] if is_streamed else [made]
        choices = [choice for part in parts for choice in part.choices]
        texts = ["".join(choice.text for choice in choices if choice.index == index) for index in range(6)]
        assert texts == ["a0", "a1", "a2", "b0", "b1", "b2"]
        named = [[t for c in choices if c.index == index for t in c.logprobs.tokens] for index in range(6)]
        assert ["".join(names) for names in named] == texts
        ends = [(choice.index, choice.finish_reason) for choice in choices if choice.finish_reason]
        assert sorted(ends) == [(index, "length") for index in range(6)]
        usage = parts[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (2, 12, 2)
        assert sorted({submit.sampling.sample_index for submit in edge.core.submits}) == [0, 1, 2]
        assert len({submit.request_id for submit in edge.core.submits}) == 2

        chat = await client.chat.completions.create(model="tiny", messages=HELLO, n=16, stream=is_streamed)
        parts = [part async for part in chat] if is_streamed else [chat]
        roles = [c.index for p in parts for c in p.choices if (c.delta if is_streamed else c.message).role]
        assert sorted(roles) == list(range(16))


@contextlib.asynccontextmanager
async def grammars(folder: Path) -> AsyncIterator[GrammarChecker]:
    tokenizer = byte_level_tokenizer()
    greeting = Greeting(
        tokenizer=str(write_tokenizer(folder, tokenizer)),
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_ids=(tokenizer.token_to_id(EOS),),
        memory_bytes=256 << 20,
        cpu_s=2,
        cache_bytes=1 << 20,
    )
    checker = GrammarChecker(greeting)
    await checker.start()
    try:
        yield checker
    finally:
        await checker.stop()


async def test_what_the_sampler_is_told_and_what_the_output_has_to_match(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    asked = {"model": "tiny", "messages": HELLO}
    (tmp_path / "model").mkdir()
    async with grammars(tmp_path / "model") as checker, front(tmp_path, grammars=checker) as (edge, client):
        await client.chat.completions.create(
            response_format=as_schema(schema), logit_bias={"97": -100, "5": 1.5}, **asked
        )
        await client.chat.completions.create(extra_body={"structured_outputs": {"choice": ["a", "b"]}}, **asked)
        first, second = edge.core.submits
        assert np.frombuffer(first.sampling.bias_ids, "<u4").tolist() == [5, 97]
        assert np.frombuffer(first.sampling.bias_values, "<f4").tolist() == [1.5, -100]
        assert (first.grammar.kind, json.loads(first.grammar.source)) == ("json_schema", schema)
        assert (second.grammar.kind, json.loads(second.grammar.source)) == ("choice", ["a", "b"])


async def test_what_an_output_cannot_match_is_refused_by_the_callers_name(tmp_path: Path) -> None:
    refused = (
        ({"response_format": as_schema({"type": "wibble"})}, "response_format.json_schema.schema"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs.regex"),
    )
    (tmp_path / "model").mkdir()
    async with grammars(tmp_path / "model") as checker, front(tmp_path, grammars=checker) as (edge, client):
        for fields, param in refused:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="tiny", messages=HELLO, **fields)
            assert caught.value.param == param
            assert caught.value.body["message"].startswith(param)
        assert edge.core.submits == []


def as_schema(schema: dict[str, object]) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}


async def test_echo_puts_the_prompt_before_the_text(tmp_path: Path) -> None:
    async with front(tmp_path) as (edge, client):
        for prompt, echoed in (("hé ", "hé "), ([97, edge.eos_id], "a<|im_end|>")):
            whole = await client.completions.create(model="tiny", prompt=prompt, max_tokens=3, echo=True)
            stream = await client.completions.create(model="tiny", prompt=prompt, max_tokens=3, echo=True, stream=True)
            text = "".join([event.choices[0].text async for event in stream])
            assert whole.choices[0].text == text
            assert text[:-3] == echoed


async def test_logprobs_of_a_chat(tmp_path: Path) -> None:
    async with front(tmp_path, script=lambda _: [97, *SMILE, 98]) as (_, client):
        made = await client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=2)
        content = made.choices[0].logprobs.content
        assert b"".join(bytes(item.bytes) for item in content).decode() == "a🙂b" == made.choices[0].message.content
        assert [item.token for item in content] == ["a", "�", "�", "�", "�", "b"]
        assert all(item.logprob == -0.5 for item in content)
        assert all([top.bytes for top in item.top_logprobs] == [[0], [1]] for item in content)
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, stream=True)
        items = [item async for event in stream for item in _content(event)]
        assert [item.token for item in items] == [item.token for item in content]
        assert all(item.top_logprobs == [] for item in items)


async def test_logprobs_of_a_completion(tmp_path: Path) -> None:
    async with front(tmp_path, script=lambda _: [97, *SMILE, 98]) as (_, client):
        made = await client.completions.create(model="tiny", prompt="abc", logprobs=1)
        found = made.choices[0].logprobs
        assert found.tokens == ["a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82", "b"]
        assert found.token_logprobs == [-0.5] * 6
        assert found.top_logprobs[0] == {"\x00": -1.0, "a": -0.5}
        assert found.text_offset == [0, 1, 1, 1, 1, 2]
        stream = await client.completions.create(model="tiny", prompt="abc", logprobs=0, stream=True)
        offsets = [offset async for event in stream for offset in event.choices[0].logprobs.text_offset]
        assert offsets == found.text_offset


async def test_echo_and_logprobs_score_the_prompt_before_the_output(tmp_path: Path) -> None:
    async with front(tmp_path, script=lambda _: [97, *SMILE]) as (edge, client):
        asked = {"model": "tiny", "prompt": "aé!", "logprobs": 1, "echo": True, "max_tokens": 5}
        whole = (await client.completions.create(**asked)).choices[0]
        stream = [event.choices[0] async for event in await client.completions.create(stream=True, **asked)]

        found = whole.logprobs
        assert whole.text == "aé!a🙂" == "".join(choice.text for choice in stream)
        assert found.tokens[:3] == ["a", "é", "!"]
        assert found.tokens[3:] == ["a", *(f"bytes:\\x{value:02x}" for value in SMILE)]
        assert found.token_logprobs == [None, -1.0, -2.0, *[-0.5] * 5]
        assert found.top_logprobs[:2] == [None, {"\x00": -1.0, "é": -1.0}]
        assert found.top_logprobs[3] == {"\x00": -1.0, "a": -0.5}
        assert found.text_offset == [0, 1, 2, 3, 4, 4, 4, 4]
        parts = [choice.logprobs for choice in stream if choice.logprobs]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [item for part in parts for item in getattr(part, name)] == getattr(found, name)
        assert edge.core.submits[0].prompt_wants.top_logprobs == 1


async def test_a_prompt_is_scored_alone_where_max_tokens_is_0(tmp_path: Path) -> None:
    async with front(tmp_path) as (edge, client):
        asked = {"model": "tiny", "logprobs": 0, "echo": True, "max_tokens": 0}
        for prompt, text in (("ab", "ab"), ([97, edge.eos_id], "a<|im_end|>"), ([98], "b")):
            made = await client.completions.create(prompt=prompt, **asked)
            stream = [event async for event in await client.completions.create(prompt=prompt, stream=True, **asked)]
            (choice,) = made.choices
            assert (choice.text, choice.finish_reason) == (text, "length")
            assert choice.logprobs.token_logprobs == [None, -1.0][: len(prompt)]
            assert choice.logprobs.text_offset == [0, 1][: len(prompt)]
            assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (len(prompt), 0)
            assert "".join(event.choices[0].text for event in stream) == text
            scores = [score for event in stream for score in event.choices[0].logprobs.token_logprobs]
            assert scores == choice.logprobs.token_logprobs
            assert stream[-1].choices[0].finish_reason == "length"


async def test_every_prompt_and_every_sample_of_it_has_the_prompts_scores(tmp_path: Path) -> None:
    async with front(tmp_path) as (_, client):
        asked = {"model": "tiny", "logprobs": 0, "echo": True, "max_tokens": 2}
        made = await client.completions.create(prompt=["ab", "cde"], n=2, **asked)
        assert [choice.logprobs.token_logprobs for choice in made.choices] == [
            *[[None, -1.0, -0.5, -0.5]] * 2,
            *[[None, -1.0, -2.0, -0.5, -0.5]] * 2,
        ]
        assert [choice.logprobs.text_offset for choice in made.choices][1:3] == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
        assert ["".join(choice.logprobs.tokens) for choice in made.choices] == [c.text for c in made.choices]
        with pytest.raises(openai.BadRequestError, match="n is 2; the limit is 1 where echo, logprobs and stream"):
            await client.completions.create(prompt="ab", n=2, stream=True, **asked)


async def test_a_token_that_the_server_puts_before_a_text_is_named_and_has_no_place_in_it(tmp_path: Path) -> None:
    async with front(tmp_path, first_token_id=1) as (_, client):
        asked = {"model": "tiny", "logprobs": 0, "echo": True, "max_tokens": 0}
        text = (await client.completions.create(prompt="ab", **asked)).choices[0]
        ids = (await client.completions.create(prompt=[97, 98], **asked)).choices[0]
        assert (text.text, text.logprobs.tokens[1:], text.logprobs.text_offset) == ("ab", ["a", "b"], [0, 0, 1])
        assert text.logprobs.token_logprobs == [None, -1.0, -2.0]
        assert (ids.text, ids.logprobs.tokens, ids.logprobs.text_offset) == ("ab", ["a", "b"], [0, 1])


def _content(event):
    logprobs = event.choices[0].logprobs
    return [] if logprobs is None else logprobs.content


async def test_models(tmp_path: Path) -> None:
    async with front(tmp_path) as (_, client):
        (model,) = (await client.models.list()).data
        assert (model.id, model.object, model.owned_by, model.max_model_len) == ("tiny", "model", "forwardplane", 128)
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("an/other")
        assert caught.value.code == "model_not_found"


async def test_what_is_not_offered_or_not_there(tmp_path: Path) -> None:
    async with front(tmp_path) as (edge, client):
        with pytest.raises(openai.APIStatusError) as caught:
            await client.embeddings.create(model="tiny", input="abc", dimensions=8)
        assert (caught.value.status_code, caught.value.code) == (400, "unsupported")
        assert caught.value.param == "dimensions"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=HELLO)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        assert edge.core.submits == []
        assert edge.metric("request_rejections_total", reason="UNKNOWN_MODEL") == 1


@pytest.mark.parametrize("prompt", ["abc", ["abc"]])
async def test_a_failure_behind_the_first_event_speaks_of_the_callers_field(tmp_path: Path, prompt: object) -> None:
    error = StreamError(reason="INVALID_REQUEST", message="the grammar ends too early", field="grammar")
    (tmp_path / "model").mkdir()
    async with (
        grammars(tmp_path / "model") as checker,
        front(tmp_path, grammars=checker, step_s=0.01) as (edge, client),
    ):
        stream = await client.completions.create(
            model="tiny", prompt=prompt, stream=True, extra_body={"structured_outputs": {"regex": "[a-z]+"}}
        )
        await anext(aiter(stream))
        message = CoreToEdge()
        message.updates.add(stream_id=edge.core.submits[0].stream_id, error=error)
        edge.core.send(message)
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
    assert caught.value.param == "structured_outputs.regex"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_leaving_cancels_at_once(tmp_path: Path, is_streamed: bool) -> None:
    async with front(tmp_path, step_s=0.02) as (edge, client):
        if is_streamed:
            stream = await client.completions.create(model="tiny", prompt="abc", stream=True)
            await anext(aiter(stream))
            await stream.close()
        else:
            asking = asyncio.create_task(client.completions.create(model="tiny", prompt="abc"))
            await until(lambda: edge.core.submits)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: edge.core.cancels)
        assert edge.core.cancels[0].reason == FinishReason.FINISH_REASON_ABORT
        assert edge.link.num_streams == 0
        await until(lambda: edge.metric("requests_total", method="/v1/completions", code="CANCELLED") == 1)
        assert edge.metric("http_open_calls") == 0


async def test_a_full_queue_is_429_with_a_time_to_come_again(tmp_path: Path) -> None:
    refuse = StreamError(reason="QUEUE_FULL", message="the queue is full", retry_after_ms=1500)
    async with front(tmp_path, refuse=refuse) as (_, client):
        for is_streamed in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(model="tiny", messages=HELLO, stream=is_streamed)
            headers = caught.value.response.headers
            assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1500")
            assert headers["x-should-retry"] == "true"
            assert (caught.value.code, caught.value.type) == ("queue_full", "rate_limit_error")


async def test_without_worker_it_is_503_and_health_says_so(tmp_path: Path) -> None:
    async with front(tmp_path) as (edge, client):
        assert (await client.get("/../health", cast_to=object)) == {"status": "serving"}
        edge.core.set_serving(is_serving=False)
        await until(lambda: not edge.link.facts.is_serving)
        for call in (
            client.get("/../health", cast_to=object),
            client.completions.create(model="tiny", prompt="abc"),
        ):
            with pytest.raises(openai.InternalServerError) as caught:
                await call
            assert (caught.value.status_code, caught.value.code) == (503, "loading")
            assert caught.value.response.headers["retry-after"] == "1"


async def test_a_late_request_is_504_before_and_an_event_behind_the_first_token(tmp_path: Path) -> None:
    async with front(tmp_path, is_silent=True) as (edge, client):
        asking = asyncio.create_task(client.completions.create(model="tiny", prompt="abc"))
        await until(lambda: edge.core.streams)
        edge.core.is_silent = False
        for stream in edge.core.streams.values():
            stream.deadline = 0
        with pytest.raises(openai.InternalServerError) as caught:
            await asking
        assert (caught.value.status_code, caught.value.code) == (504, "deadline_passed")

        edge.core.step_s = 0.01
        stream = await client.completions.create(model="tiny", prompt="abc", stream=True)
        texts = [(await anext(aiter(stream))).choices[0].text]
        for running in edge.core.streams.values():
            running.deadline = 0
        with pytest.raises(openai.APIError, match="time is over"):
            texts += [event.choices[0].text async for event in stream]
        assert "".join(texts).startswith("i")
        assert edge.metric("requests_total", method="/v1/completions", code="DEADLINE_EXCEEDED") == 2


async def test_a_core_that_dies_ends_streams_with_an_error(tmp_path: Path) -> None:
    async with front(tmp_path, step_s=0.01) as (edge, client):
        stream = await client.completions.create(model="tiny", prompt="abc", stream=True)
        await anext(aiter(stream))
        edge.core.hang_up()
        with pytest.raises(openai.APIError, match="core is gone"):
            _ = [event async for event in stream]
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="tiny", prompt="abc")
        assert caught.value.status_code == 503


async def test_draining_finishes_streams_and_refuses_new_ones(tmp_path: Path) -> None:
    async with front(tmp_path, step_s=0.01) as (edge, client):
        stream = await client.completions.create(model="tiny", prompt="abc", max_tokens=30, stream=True)
        await anext(aiter(stream))
        draining = asyncio.create_task(edge.server.drain(timeout_s=10))
        await asyncio.sleep(0.02)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="tiny", prompt="abc")
        assert caught.value.code == "draining"
        events = [event async for event in stream]
        assert events[-1].choices[0].finish_reason == "length"
        await draining
        await edge.server.stop()
        await edge.http.stop()
        with pytest.raises(openai.APIConnectionError):
            await client.models.list()


async def test_streams_that_do_not_finish_in_time_are_told(tmp_path: Path) -> None:
    async with front(tmp_path, step_s=0.05) as (edge, client):
        stream = await client.completions.create(model="tiny", prompt="abc", stream=True)
        await anext(aiter(stream))
        await edge.server.drain(timeout_s=0.1)
        with pytest.raises(openai.APIError, match="shut down"):
            _ = [event async for event in stream]
