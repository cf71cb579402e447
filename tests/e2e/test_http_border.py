"""The HTTP front against whatever is sent to it: every refusal has OpenAI's shape, in time, and nothing is spent."""

import asyncio
import contextlib
import io
import json
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from protos.forwardplane.v1.bridge_pb2 import CoreModel
from protos.wire.limits import MAX_CALLER_MESSAGE_BYTES
from tests.support.edge_harness import CHATML, Edge, running_edge
from tests.support.waiting import until

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
JSON = {"Content-Type": "application/json"}


@contextlib.asynccontextmanager
async def front(folder: Path, **options: object) -> AsyncIterator[tuple[Edge, aiohttp.ClientSession]]:
    limits = options.pop("http_limits", {})
    async with (
        running_edge(folder, **{"template": CHATML, **options}, http_limits=limits) as edge,
        aiohttp.ClientSession(base_url=f"http://127.0.0.1:{edge.http.port}") as session,
    ):
        yield edge, session


async def refused(call) -> tuple[int, dict[str, Any]]:
    async with call as reply:
        body = await reply.json()
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return reply.status, body["error"]


async def raw(edge: Edge, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", edge.http.port)
    writer.write(sent)
    await writer.drain()
    return reader, writer


def head(length: str, path: str = COMPLETION, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", length, *more]
    return "\r\n".join([*lines, "", ""]).encode()


UNSUPPORTED = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "functions": [{}],
    "function_call": "auto",
    "parallel_tool_calls": True,
    "modalities": ["audio"],
    "audio": {"voice": "x"},
    "prediction": {},
    "reasoning_effort": "low",
    "verbosity": "low",
    "web_search_options": {},
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "flex",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
}


async def test_each_field_that_is_not_offered_is_refused_by_name(tmp_path: Path) -> None:
    async with front(tmp_path) as (edge, session):
        for name, value in UNSUPPORTED.items():
            status, error = await refused(session.post(CHAT, json={"messages": MESSAGES, name: value}))
            assert (status, error["param"], error["code"]) == (400, name, "unsupported"), name
            assert error["message"].startswith(f"{name} is not offered"), name
            assert error["type"] == "invalid_request_error"
        for name, value in {"best_of": 2, "suffix": "x"}.items():
            status, error = await refused(session.post(COMPLETION, json={"prompt": "a", name: value}))
            assert (status, error["param"], error["code"]) == (400, name, "unsupported"), name
        assert edge.core.submits == []


async def test_neutral_values_of_fields_that_are_not_offered_ask_for_nothing(tmp_path: Path) -> None:
    neutral = {"n": 1, "tools": [], "tool_choice": "none", "logit_bias": {}, "response_format": {"type": "text"}}
    nothing = dict.fromkeys(UNSUPPORTED) | dict.fromkeys(("stop", "seed", "temperature", "max_tokens", "user"))
    async with front(tmp_path) as (edge, session):
        for fields in (neutral, nothing, {"frequency_penalty": 0, "presence_penalty": 0, "store": False}):
            async with session.post(CHAT, json={"messages": MESSAGES, **fields}) as reply:
                assert reply.status == 200, await reply.text()
        assert len(edge.core.submits) == 3


SCORED = {"prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 1}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {}, "messages", "is missing"),
    (CHAT, {"messages": []}, "messages", "messages is empty"),
    (CHAT, {"messages": MESSAGES, "wibble": 1}, "wibble", "wibble is not a field"),
    (CHAT, {"messages": MESSAGES, "prompt": "a"}, "prompt", "prompt is not a field"),
    (
        CHAT,
        {"messages": [{"role": "tool", "content": "a"}]},
        "messages[0].role",
        "messages[0].role is not one of: system, developer, user, assistant",
    ),
    (CHAT, {"messages": [*MESSAGES, {"role": "user"}]}, "messages[1].content", "is missing"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "name": "n"}]}, "messages[0].name", "is not offered"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "x": None}]}, "messages[0].x", "is not a field"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
        "messages[0].content[1].type",
        "is not one of: text",
    ),
    (CHAT, {"messages": MESSAGES, "temperature": "1"}, "temperature", "has to be a number"),
    (CHAT, {"messages": MESSAGES, "temperature": True}, "temperature", "has to be a number"),
    (CHAT, {"messages": MESSAGES, "temperature": -1}, "temperature", "temperature is -1; allowed: [0, 100]"),
    (CHAT, {"messages": MESSAGES, "top_p": 0}, "top_p", "top_p is 0; allowed: [1.17549e-38, 1]"),
    (CHAT, {"messages": MESSAGES, "frequency_penalty": 5}, "frequency_penalty", "frequency_penalty is 5; allowed"),
    (CHAT, {"messages": MESSAGES, "presence_penalty": 9}, "presence_penalty", "presence_penalty is 9; allowed"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 0}, "max_tokens", "max_tokens is 0; must be 1 or more"),
    (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 1 << 70},
        "max_tokens",
        f"max_tokens is {1 << 70}; allowed: [0, what the model allows]",
    ),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0"),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": 128}, "max_completion_tokens", "the limit is"),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": 2, "max_tokens": 3}, "max_tokens", "they mean the same"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 1}, "top_logprobs", "needs logprobs"),
    (CHAT, {"messages": MESSAGES, "logprobs": 3}, "logprobs", "has to be true or false"),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21; allowed"),
    (
        CHAT,
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": -1},
        "top_logprobs",
        "top_logprobs is -1; allowed: [0, 20]",
    ),
    (CHAT, {"messages": MESSAGES, "stop": ""}, "stop[0]", "stop[0] is empty"),
    (CHAT, {"messages": MESSAGES, "stop": ["a"] * 33}, "stop", "stop has 33 items; the limit is 32"),
    (CHAT, {"messages": MESSAGES, "stop": [1]}, "stop[0]", "has to be a text"),
    (
        CHAT,
        {"messages": MESSAGES, "seed": 1 << 64},
        "seed",
        f"seed is {1 << 64}; allowed: [{-(1 << 63)}, {(1 << 64) - 1}]",
    ),
    (CHAT, {"messages": MESSAGES, "user": "u" * 129}, "user", "user has 129 bytes or more; the limit is 128"),
    (CHAT, {"messages": MESSAGES, "stream_options": {"x": 1}}, "stream_options.x", "is not a field"),
    (CHAT, {"messages": MESSAGES, "min_tokens": 3, "max_tokens": 2}, "min_tokens", "the limit is max_tokens, 2"),
    (CHAT, {"messages": MESSAGES, "n": 0}, "n", "n is 0; allowed: [1, 16]"),
    (CHAT, {"messages": MESSAGES, "n": 17}, "n", "n is 17; allowed: [1, 16]"),
    (CHAT, {"messages": MESSAGES, "n": 2.0}, "n", "has to be a whole number"),
    (CHAT, {"messages": MESSAGES, "n": -1}, "n", "n is -1; allowed: [1, 16]"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"5": 101}}, "logit_bias[5]", "allowed: [-100, 100]"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"300": 1}}, "logit_bias[300]", "allowed: [0, 299]"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"-1": 1}}, "logit_bias[-1]", "allowed: [0, 299]"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"05": 1}}, "logit_bias", "not a token id"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"9" * 30: 1}}, "logit_bias", "not a token id"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"5": "1"}}, "logit_bias[5]", "has to be a number"),
    (CHAT, {"messages": MESSAGES, "logit_bias": [5]}, "logit_bias", "has to be an object"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "limit is 300"),
    (CHAT, {"messages": MESSAGES, "allowed_token_ids": [300]}, "allowed_token_ids[0]", "allowed: [0, 299]"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format", "whose type is text"),
    (CHAT, {"messages": MESSAGES, "response_format": "text"}, "response_format", "has to be an object"),
    (
        CHAT,
        {"messages": MESSAGES, "response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "is missing",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}},
        "response_format.json_schema.schema",
        "has to be an object",
    ),
    (CHAT, {"messages": MESSAGES, "structured_outputs": []}, "structured_outputs", "has to be an object"),
    (CHAT, {"messages": MESSAGES, "structured_outputs": {}}, "structured_outputs", "it has none"),
    (
        CHAT,
        {"messages": MESSAGES, "structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs",
        "it has regex, choice",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "cannot be combined with response_format",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "structured_outputs": {"choice": ["a", ""]}},
        "structured_outputs.choice[1]",
        "structured_outputs.choice[1] is empty",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "structured_outputs": {"xgrammar": "a"}},
        "structured_outputs.xgrammar",
        "not a field",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "structured_outputs": {"regex": "a"}, "ignore_eos": True},
        "ignore_eos",
        "cannot be combined with regex",
    ),
    (CHAT, {"messages": MESSAGES, "guided_regex": "a"}, "guided_regex", "is not a field"),
    (COMPLETION, {}, "prompt", "is missing"),
    (COMPLETION, {"prompt": ""}, "prompt", "prompt is empty"),
    (COMPLETION, {"prompt": []}, "prompt", "prompt is empty"),
    (COMPLETION, {"prompt": [[]]}, "prompt[0]", "prompt[0] is empty"),
    (COMPLETION, {"prompt": ["a", ""]}, "prompt[1]", "prompt[1] is empty"),
    (COMPLETION, {"prompt": ["a", 5]}, "prompt[1]", "prompt[1] has to be a text or a list of token ids"),
    (COMPLETION, {"prompt": [["a"]]}, "prompt[0][0]", "prompt[0][0] has to be a whole number"),
    (COMPLETION, {"prompt": [1, "a"]}, "prompt[1]", "prompt[1] has to be a whole number"),
    (COMPLETION, {"prompt": ["1", [1.5]]}, "prompt[1][0]", "has to be a whole number"),
    (COMPLETION, {"prompt": [1.5]}, "prompt[0]", "has to be a whole number"),
    (COMPLETION, {"prompt": [True]}, "prompt[0]", "has to be a whole number"),
    (COMPLETION, {"prompt": [None]}, "prompt[0]", "has to be a text or a list of token ids"),
    (COMPLETION, {"prompt": 5}, "prompt", "prompt has to be a text, a list of token ids, or a list of"),
    (COMPLETION, {"prompt": {"a": 1}}, "prompt", "has to be a text, a list of token ids, or"),
    (COMPLETION, {"prompt": None}, "prompt", "has to be a text, a list of token ids, or"),
    (COMPLETION, {"prompt": [1, 300]}, "prompt[1]", "prompt[1] is 300; allowed: [0, 299]"),
    (COMPLETION, {"prompt": [[1], [1, -1]]}, "prompt[1][1]", "prompt[1][1] is -1; allowed: [0, 299]"),
    (COMPLETION, {"prompt": ["a", "b" * 200]}, "prompt[1]", "prompt[1] has 200 tokens"),
    (COMPLETION, {"prompt": ["a"] * 65}, "prompt", "has 65 items; the limit is 64"),
    (COMPLETION, {"prompt": [1], "stop": "a"}, "stop", "stop cannot be combined with a prompt of token ids"),
    (COMPLETION, {"prompt": "a", "logprobs": 21}, "logprobs", "logprobs is 21; allowed: [0, 20]"),
    (COMPLETION, {"prompt": "a", "logprobs": True}, "logprobs", "has to be a whole number"),
    (
        COMPLETION,
        {"prompt": "a", "max_tokens": 0},
        "max_tokens",
        "max_tokens is 0; allowed only together with echo and",
    ),
    (COMPLETION, {"prompt": "a", "max_tokens": 0, "echo": True}, "max_tokens", "together with echo and logprobs"),
    (COMPLETION, {"prompt": "a", "max_tokens": 0, "logprobs": 1}, "max_tokens", "together with echo and logprobs"),
    (COMPLETION, {**SCORED, "n": 2}, "n", "n is 2; the limit is 1 where"),
    (COMPLETION, {**SCORED, "logprobs": 21}, "logprobs", "logprobs is 21; allowed: [0, 20]"),
    (COMPLETION, {**SCORED, "min_tokens": 1}, "min_tokens", "the limit is max_tokens, 0"),
    (COMPLETION, {**SCORED, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex", "with max_tokens 0"),
    (COMPLETION, {"prompt": "a", "messages": []}, "messages", "is not a field"),
]


async def test_each_bad_value_is_refused_by_the_name_that_was_sent(tmp_path: Path) -> None:
    async with front(tmp_path) as (edge, session):
        for path, body, param, says in REFUSED:
            for is_streamed in (False, True):
                status, error = await refused(session.post(path, json={**body, "stream": is_streamed}))
                assert (status, error["param"]) == (400, param), (body, error)
                assert says in error["message"], (body, error)
                assert "sampling." not in error["message"]
                assert "stop." not in error["message"]
        _, error = await refused(session.post(CHAT, json={"messages": MESSAGES, "stream_options": {}}))
        assert error["message"] == "stream_options needs stream to be true"
        assert edge.core.submits == []


EMBEDDINGS = "/v1/embeddings"
REFUSED_INPUTS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "input is missing"),
    ({"input": ""}, "input", "input is empty"),
    ({"input": ["a", ""]}, "input[1]", "input[1] is empty"),
    ({"input": 5}, "input", "input has to be a text, a list of token ids, or a list of texts"),
    ({"input": [1, "a"]}, "input[1]", "input[1] has to be a whole number"),
    ({"input": [1, 300]}, "input[1]", "input[1] is 300; allowed: [0, 299]"),
    ({"input": [[1], [2, 300]]}, "input[1][1]", "input[1][1] is 300; allowed: [0, 299]"),
    ({"input": ["a", "b" * 200]}, "input[1]", "input[1] has 200 tokens"),
]


async def test_each_bad_input_of_an_embedding_is_refused_by_its_place(tmp_path: Path) -> None:
    async with front(tmp_path) as (edge, session):
        for body, param, says in REFUSED_INPUTS:
            status, error = await refused(session.post(EMBEDDINGS, json=body))
            assert (status, error["param"]) == (400, param), (body, error)
            assert says in error["message"], (body, error)
        assert edge.core.submits == []


async def test_what_is_no_json_object_is_refused(tmp_path: Path) -> None:
    bodies = (
        b"",
        b"{",
        b'{"prompt": "a"',
        b"\xff\xfe",
        b"[]",
        b"null",
        b'"a"',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a"} {}',
        b'{"prompt": "\xff"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
    )
    async with front(tmp_path) as (edge, session):
        for body in bodies:
            status, error = await refused(session.post(COMPLETION, data=body, headers=JSON))
            assert (status, error["code"]) == (400, "invalid_request"), body[:20]
        for sent, param in (
            (b'{"prompt": "a", "temperature": NaN}', "temperature"),
            (b'{"prompt": "a", "temperature": 1e400}', "temperature"),
            (b'{"prompt": "a", "seed": 1e400}', "seed"),
            (b'{"prompt": "a", "prompt": "b"}', "prompt"),
            (b'{"prompt": "a", "logit_bias": {"5": 1e400}}', "logit_bias[5]"),
        ):
            status, error = await refused(session.post(COMPLETION, data=sent, headers=JSON))
            assert (status, error["param"]) == (400, param), sent
        assert edge.metric("request_rejections_total", reason="INVALID_REQUEST") == len(bodies) + 5


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(tmp_path: Path) -> None:
    async with front(tmp_path) as (_, session):
        status, error = await refused(session.post(COMPLETION, json={"prompt": "a" * 100_000}))
        assert (status, error["param"]) == (400, "prompt")
        assert "tokens or more; the context of 128" in error["message"]


async def test_other_content_types_and_encodings_are_415(tmp_path: Path) -> None:
    async with front(tmp_path) as (edge, session):
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            status, error = await refused(session.post(CHAT, data=b"{}", headers={"Content-Type": kind}))
            assert (status, error["code"]) == (415, "unsupported_media_type")
            assert "application/json" in error["message"]
        status, _ = await refused(session.post(CHAT, data=b"{}", headers={**JSON, "Content-Encoding": "gzip"}))
        assert status == 415
        async with session.post(
            COMPLETION, data=b'{"prompt": "a"}', headers={"Content-Type": "application/json; charset=utf-8"}
        ) as reply:
            assert reply.status == 200
        assert edge.metric("requests_total", method=CHAT, code="INVALID_ARGUMENT") == 4


async def test_routes_and_methods_that_are_not_there(tmp_path: Path) -> None:
    async with front(tmp_path) as (_, session):
        status, error = await refused(session.get("/v1/nothing"))
        assert (status, error["code"]) == (404, "not_found")
        async with session.get(CHAT) as reply:
            assert (reply.status, reply.headers["Allow"]) == (405, "POST")
            assert (await reply.json())["error"]["code"] == "method_not_allowed"
        status, _ = await refused(session.options(CHAT))
        assert status == 405
        async with session.head("/health") as reply:
            assert reply.status == 200


async def test_ten_megabytes_are_refused_before_they_are_read(tmp_path: Path) -> None:
    size = 10 << 20
    async with front(tmp_path) as (edge, session):
        status, error = await refused(session.post(COMPLETION, data=io.BytesIO(b"x" * size), headers=JSON))
        assert (status, error["code"]) == (413, "message_too_large")
        assert error["message"] == f"the body has {size} bytes; the limit is {MAX_CALLER_MESSAGE_BYTES}"

        reader, writer = await raw(edge, head(f"Content-Length: {size}"))
        assert (await asyncio.wait_for(reader.readline(), 30)).startswith(b"HTTP/1.1 413")
        writer.close()

        reader, writer = await raw(edge, head(f"Content-Length: {size}", COMPLETION, "Expect: 100-continue"))
        assert (await asyncio.wait_for(reader.readline(), 30)).startswith(b"HTTP/1.1 413")
        writer.close()


async def test_a_body_that_hides_its_size_is_cut_off(tmp_path: Path) -> None:
    async with front(tmp_path) as (edge, _):
        reader, writer = await raw(edge, head("Transfer-Encoding: chunked"))
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        for _ in range(MAX_CALLER_MESSAGE_BYTES // 65536 + 1):
            writer.write(chunk)
            await writer.drain()
        assert (await asyncio.wait_for(reader.readline(), 30)).startswith(b"HTTP/1.1 413")
        writer.close()


async def test_a_caller_that_asks_before_it_sends_may_go_on(tmp_path: Path) -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'
    async with front(tmp_path) as (edge, _):
        reader, writer = await raw(edge, head(f"Content-Length: {len(body)}", COMPLETION, "Expect: 100-continue"))
        assert (await reader.readline()).startswith(b"HTTP/1.1 100")
        await reader.readline()
        writer.write(body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_slow_body_is_408_and_the_connection_ends(tmp_path: Path) -> None:
    async with front(tmp_path, http_limits={"body_s": 0.2, "linger_s": 1.0}) as (edge, _):
        reader, writer = await raw(edge, head("Content-Length: 100"))
        dripping = asyncio.create_task(_drip(writer))
        reply = await asyncio.wait_for(reader.readuntil(b'"code": "request_timeout"'), 30)
        assert reply.startswith(b"HTTP/1.1 408")
        # What the server has not read when it closes would reset the connection.
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        await asyncio.wait_for(reader.read(), 30)
        writer.close()
        await until(lambda: edge.metric("http_open_calls") == 0)


async def _drip(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"])
async def test_headers_that_do_not_come_end_the_connection(tmp_path: Path, sent: bytes) -> None:
    async with front(tmp_path, http_limits={"headers_s": 0.2}) as (edge, _):
        reader, writer = await raw(edge, sent)
        dripping = asyncio.create_task(_drip(writer)) if sent else None
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 30) == b""
        if dripping is not None:
            dripping.cancel()
            await asyncio.gather(dripping, return_exceptions=True)
        writer.close()


async def test_what_is_not_http_is_400_and_is_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with front(tmp_path) as (edge, _):
        for sent in (
            b"secret\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET / HTTP/1.1\r\nX: " + b"a" * 10_000 + b"\r\n\r\n",
        ):
            reader, writer = await raw(edge, sent)
            assert (await asyncio.wait_for(reader.readline(), 30)).split()[1] == b"400"
            writer.close()
    assert "secret" not in caplog.text


async def test_no_more_calls_than_the_limit(tmp_path: Path) -> None:
    async with front(tmp_path, http_limits={"max_calls": 2}) as (edge, session):
        held = [await raw(edge, head("Content-Length: 100")) for _ in range(2)]
        await until(lambda: edge.metric("http_open_calls") == 2)
        status, error = await refused(session.post(COMPLETION, json={"prompt": "a"}))
        assert (status, error["code"]) == (429, "queue_full")
        for _, writer in held:
            writer.close()
        await until(lambda: edge.metric("http_open_calls") == 0)
        async with session.post(COMPLETION, json={"prompt": "a"}) as reply:
            assert reply.status == 200


async def test_one_connection_serves_call_after_call(tmp_path: Path) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1, "stream": True}).encode()
    async with front(tmp_path) as (edge, _):
        one = head(f"Content-Length: {len(body)}") + body
        reader, writer = await raw(edge, one * 3)
        got = b""
        async with asyncio.timeout(30):
            while got.count(b"data: [DONE]") < 3:
                got += await reader.read(65536)
        assert got.count(b"HTTP/1.1 200 OK") == 3
        writer.close()


async def rest_of(connection: socket.socket) -> bytes:
    content = b""
    while more := await asyncio.get_running_loop().sock_recv(connection, 1 << 20):
        content += more
    return content


async def test_a_reader_who_stops_is_given_up_with_an_error_and_others_do_not_notice(
    tmp_path: Path, caplog, monkeypatch
) -> None:
    monkeypatch.setattr("scheduler_svc.edge.http_front.http_server._LAST_READ_S", 1.0)
    body = json.dumps({"prompt": "a", "logprobs": 20, "stream": True}).encode()
    model = CoreModel(context_tokens=1_000_000, logits_width=300, max_logprobs=20, serving=True)
    options = {"http_limits": {"write_s": 0.3}, "ids_per_step": 20, "model": model}
    async with front(tmp_path, **options) as (edge, session):
        with socket.socket() as stopped:
            stopped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stopped.setblocking(False)
            await asyncio.get_running_loop().sock_connect(stopped, ("127.0.0.1", edge.http.port))
            await asyncio.get_running_loop().sock_sendall(stopped, head(f"Content-Length: {len(body)}") + body)
            await until(lambda: edge.core.streams)
            async with session.post(COMPLETION, json={"prompt": "a", "max_tokens": 5}) as reply:
                assert reply.status == 200
            await until(lambda: edge.metric("http_open_calls") == 0, timeout_s=30)
            await until(lambda: not edge.core.streams)
            content = await asyncio.wait_for(rest_of(stopped), 30)
        assert edge.metric("requests_total", method=COMPLETION, code="RESOURCE_EXHAUSTED") == 1
        assert b"reads too slowly" in content.rpartition(b"data: ")[2]
        assert content.endswith(b"0\r\n\r\n")
        (record,) = [record for record in caplog.records if "reads too slowly" in record.message]
        assert record.output_tokens > 0
        assert edge.link.num_streams == 0
        await asyncio.sleep(1.1)  # the connection is over by then, and is not cut once more
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_thousand_calls_leave_nothing(tmp_path: Path) -> None:
    async with front(tmp_path, step_s=0.0005) as (edge, session):

        async def ask(index: int) -> int:
            fields = {"prompt": "a", "max_tokens": 3, "stream": index % 2 == 0}
            async with session.post(COMPLETION, json=fields) as reply:
                await reply.read()
                return reply.status

        for begin in range(0, 1000, 100):
            assert set(await asyncio.gather(*(ask(index) for index in range(begin, begin + 100)))) == {200}
        await until(lambda: edge.metric("http_open_calls") == 0)
        assert edge.link.num_streams == 0
        assert edge.core.streams == {}
        assert edge.metric("requests_total", method=COMPLETION, code="OK") == 1000
