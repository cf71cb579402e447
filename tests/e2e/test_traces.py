"""Traces of a served run arrive at an OTLP receiver: one call from its server span to the plans on the worker."""

import asyncio
import time
import urllib.request

import grpc
import pytest

from protos.client.generation_client import GenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from protos.client.serve_command import SimulatedOptions
from protos.forwardplane.v1 import generate_pb2, generate_pb2_grpc
from tests.support.served import served
from tests.support.span_receiver import span_receiver

pytestmark = pytest.mark.timeout(120)
TRACE, CALLER = "ab" * 16, "cd" * 8
STAGES = ("queue", "prefill", "decode")


@pytest.fixture(scope="module")
def spans():
    """Of one run: a traced call, one that its caller does not want traced, one refused, one over HTTP."""
    with span_receiver() as receiver:
        endpoint = ("--trace-endpoint", receiver.endpoint)
        flags = (*endpoint, "--trace-ratio", "0", "--trace-plan-ratio", "1")
        simulated = SimulatedOptions(simulated_step_ms=2.0)
        with served(
            device="simulated", numerics="fast", simulated=simulated, worker_flags=endpoint, scheduler_flags=flags
        ) as server:
            asyncio.run(call_all(server.target))
            with GenerationClient(server.target) as client:
                client.generate([TokenIds((1, 2, 3))], GenerateOptions(max_tokens=2, ignore_eos=True))
        yield receiver


async def call_all(target):
    async with grpc.aio.insecure_channel(target) as channel:
        stub = generate_pb2_grpc.GenerationServiceStub(channel)
        asked = generate_pb2.GenerateRequest(
            tokens=generate_pb2.TokenPrompt(ids=range(40)),
            sampling={"temperature": 0.5, "seed": 7, "n": 2},
            stop={"max_tokens": 6, "ignore_eos": True},
        )
        headers = (("traceparent", f"00-{TRACE}-{CALLER}-01"),)
        async for _ in stub.Generate(asked, metadata=headers):
            pass
        asked.sampling.top_p = 7.0
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.GenerateOnce(generate_pb2.GenerateOnceRequest(requests=[asked]), metadata=headers)


def test_every_recorded_span_is_of_the_callers_trace(spans):
    assert {span.trace_id for span in spans.spans} == {TRACE}, "nobody decided for the other calls, and the ratio is 0"
    assert {span.service for span in spans.spans} == {
        "forwardplane-edge",
        "forwardplane-scheduler",
        "forwardplane-worker",
    }


def test_the_server_span_says_what_was_asked_and_used(spans):
    (call,) = spans.named("forwardplane.v1.GenerationService/Generate")
    assert call.parent_id == CALLER
    wanted = {
        "rpc.method": "Generate",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "simulated-8b",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 12,
    }
    assert call.attributes.items() >= wanted.items()
    assert call.attributes["gen_ai.response.id"]


def test_a_refused_call_has_a_span_with_the_reason(spans):
    (call,) = spans.named("forwardplane.v1.GenerationService/GenerateOnce")
    assert call.error == call.attributes["error.type"] == "INVALID_REQUEST"


def test_queue_prefill_and_decode_follow_each_other_under_the_call(spans):
    (call,) = spans.named("forwardplane.v1.GenerationService/Generate")
    for name in STAGES:
        assert len(spans.named(name)) == 2, "one for each sample"
        assert {span.parent_id for span in spans.named(name)} == {call.span_id}
    ends = [sorted(span.end_ns for span in spans.named(name)) for name in STAGES]
    begins = [sorted(span.begin_ns for span in spans.named(name)) for name in STAGES]
    assert ends[0] == begins[1]
    assert ends[1] == begins[2]
    assert call.begin_ns <= begins[0][0] <= ends[2][1] <= call.end_ns + 50_000_000


def test_a_plan_has_a_span_on_either_side(spans):
    (call,) = spans.named("forwardplane.v1.GenerationService/Generate")
    sent, run = spans.named("plan"), spans.named("plan on worker")
    assert len(sent) == len(run) >= 6
    assert {span.parent_id for span in sent} == {call.span_id}
    assert {span.parent_id for span in run} == {span.span_id for span in sent}, "the context travels in the plan"
    by_id = {span.span_id: span for span in sent}
    for span in run:
        assert span.attributes["forwardplane.plan.seq"] == by_id[span.parent_id].attributes["forwardplane.plan.seq"]
        (forward,) = [stage for stage in spans.named("forward") if stage.parent_id == span.span_id]
        assert span.begin_ns <= forward.begin_ns < forward.end_ns <= span.end_ns


def test_a_receiver_that_is_not_there_holds_up_neither_calls_nor_the_stop():
    simulated = SimulatedOptions(simulated_step_ms=1.0)
    flags = ("--trace-endpoint", "http://127.0.0.1:9")
    with served(
        device="simulated", numerics="fast", simulated=simulated, worker_flags=flags, scheduler_flags=flags
    ) as server:
        with GenerationClient(server.target) as client:
            begun = time.monotonic()
            client.generate([TokenIds((1, 2, 3))], GenerateOptions(max_tokens=20, ignore_eos=True))
            assert time.monotonic() - begun < 9.0
        with urllib.request.urlopen(f"http://127.0.0.1:{server.options.ports.metrics_port}/metrics") as reply:
            assert reply.status == 200
        begun = time.monotonic()
    assert time.monotonic() - begun < 20.0
