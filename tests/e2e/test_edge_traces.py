"""The server span of each kind of call: what was asked and used; whatever ends a call ends its span."""

import asyncio
import contextlib
import json
import urllib.request

import grpc
import pytest

from protos.forwardplane.v1 import generate_pb2 as pb
from protos.forwardplane.v1.bridge_pb2 import StreamError
from tests.support.edge_harness import running_edge
from tests.support.span_receiver import in_memory

CALLER = "00-" + "ab" * 16 + "-" + "cd" * 8
SAMPLED, UNSAMPLED = CALLER + "-01", CALLER + "-00"
SECRET = "a secret prompt"


@contextlib.asynccontextmanager
async def traced_edge(folder, *, ratio=1.0, **options):
    """An edge, and its spans as they end."""
    spans, exporter = in_memory(ratio=ratio)
    async with running_edge(folder, tracing=spans, **options) as edge:
        yield edge, exporter.get_finished_spans


async def ended(spans, count):
    async with asyncio.timeout(30):
        while len(spans()) < count:
            await asyncio.sleep(0.002)
    return spans()


def request(**stop):
    return pb.GenerateRequest(text=SECRET, stop=stop)


async def test_s16_a_stream_is_of_its_callers_trace_and_hands_it_to_the_core(tmp_path):
    async with traced_edge(tmp_path) as (edge, spans):
        asked = request(max_tokens=3)
        asked.sampling.top_k = 5
        async for _ in edge.stub.Generate(asked, metadata=(("traceparent", SAMPLED),)):
            pass
        (call,) = await ended(spans, 1)
        (submit,) = edge.core.submits
    assert call.name == "forwardplane.v1.GenerationService/Generate"
    assert (f"{call.context.trace_id:032x}", f"{call.parent.span_id:016x}") == ("ab" * 16, "cd" * 8)
    assert submit.traceparent == f"00-{'ab' * 16}-{call.context.span_id:016x}-01"
    assert dict(call.attributes) == {
        "rpc.system": "grpc",
        "rpc.service": "forwardplane.v1.GenerationService",
        "rpc.method": "Generate",
        "gen_ai.provider.name": "forwardplane",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.top_k": 5,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": submit.request_id,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": len(SECRET),
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.usage.output_tokens": 3,
    }, "and nothing of what was asked or answered"


async def test_a_call_whose_caller_does_not_want_it_is_recorded_by_nobody(tmp_path):
    async with traced_edge(tmp_path) as (edge, spans):
        async for _ in edge.stub.Generate(request(max_tokens=1), metadata=(("traceparent", UNSAMPLED),)):
            pass
        assert edge.core.submits[0].traceparent == ""
        assert spans() == ()


HEADERS = [
    (),
    (("traceparent", "x" * 4096),),
    (("traceparent", SAMPLED[:-1]),),
    (("traceparent", "ff" + SAMPLED[2:]),),
    (("traceparent", SAMPLED.replace("ab", "zz")),),
    (("traceparent", "00-" + "0" * 32 + SAMPLED[35:]),),
]


@pytest.mark.parametrize("headers", HEADERS)
async def test_without_a_readable_header_a_trace_begins(tmp_path, headers):
    async with traced_edge(tmp_path) as (edge, spans):
        await edge.stub.GenerateOnce(pb.GenerateOnceRequest(requests=[request(max_tokens=1)] * 2), metadata=headers)
        (call,) = await ended(spans, 1)
    assert call.parent is None
    assert call.attributes["forwardplane.prompts"] == 2
    assert call.attributes["gen_ai.usage.output_tokens"] == 2


async def test_embeddings_have_a_span_of_their_own_kind(tmp_path):
    async with traced_edge(tmp_path) as (edge, spans):
        await edge.stub.Embed(pb.EmbedRequest(requests=[pb.GenerateRequest(text=SECRET)]))
        (call,) = await ended(spans, 1)
    assert call.name.endswith("/Embed")
    assert call.attributes["gen_ai.operation.name"] == "embeddings"


async def test_http_calls_are_traced_by_their_route(tmp_path):
    async with traced_edge(tmp_path, http_limits={}) as (edge, spans):
        body = json.dumps({"model": "tiny", "prompt": SECRET, "max_tokens": 2}).encode()
        headers = {"Content-Type": "application/json", "traceparent": SAMPLED}
        asked = urllib.request.Request(f"http://127.0.0.1:{edge.http.port}/v1/completions", body, headers)
        with await asyncio.to_thread(urllib.request.urlopen, asked) as reply:
            assert reply.status == 200
        (call,) = await ended(spans, 1)
    assert (call.name, call.attributes["http.route"]) == ("POST /v1/completions", "/v1/completions")
    assert f"{call.parent.span_id:016x}" == "cd" * 8
    assert call.attributes["gen_ai.usage.output_tokens"] == 2


async def test_a_call_that_the_core_refuses_or_the_door_ends_its_span_with_the_reason(tmp_path):
    async with traced_edge(tmp_path, refuse=StreamError(reason="QUEUE_FULL", message="full")) as (edge, spans):
        for wanted in (request(max_tokens=3), request(max_tokens=1 << 30)):
            with pytest.raises(grpc.aio.AioRpcError):
                await edge.stub.GenerateOnce(pb.GenerateOnceRequest(requests=[wanted]))
        refused = await ended(spans, 2)
    assert [span.attributes["error.type"] for span in refused] == ["QUEUE_FULL", "INVALID_REQUEST"]


async def test_a_caller_that_leaves_ends_the_span(tmp_path):
    async with traced_edge(tmp_path) as (edge, spans):
        call = edge.stub.Generate(request(max_tokens=100, ignore_eos=True))
        await call.read()
        call.cancel()
        (left,) = await ended(spans, 1)
    assert left.attributes["gen_ai.response.finish_reasons"] == ("abort",)
