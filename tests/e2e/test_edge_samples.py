"""Several samples of one prompt, and what an output has to match, through a real edge with a made-up core."""

import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest

from protos.forwardplane.v1 import generate_pb2 as pb
from protos.forwardplane.v1.bridge_pb2 import StreamError, SubmitStream
from protos.forwardplane.v1.sampling_pb2 import FinishReason, SamplingParameters, StopParameters
from protos.service.status import from_rpc_error
from protos.wire import errors
from scheduler_svc.text.grammar_checker import GrammarChecker
from scheduler_svc.text.grammar_messages import Greeting
from tests.support.edge_harness import running_edge
from tests.support.tiny_tokenizer import EOS, byte_level_tokenizer, write_tokenizer


def request_of(n: int, *, max_tokens: int = 6, **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text="abc",
        sampling=SamplingParameters(n=n, seed=5),
        stop=StopParameters(max_tokens=max_tokens),
        client_tag="mine",
        **fields,
    )


def by_sample(submit: SubmitStream) -> list[int]:
    """A letter of its own for each sample, and a length of its own."""
    index = submit.sampling.sample_index
    return [97 + index] * (submit.max_tokens - index % 3)


async def collect(call: grpc.aio.UnaryStreamCall) -> list[pb.GenerateChunk]:
    return [chunk async for chunk in call]


async def read_on(call: grpc.aio.UnaryStreamCall, chunks: list[pb.GenerateChunk]) -> None:
    while (chunk := await call.read()) is not grpc.aio.EOF:
        chunks.append(chunk)


async def failure(call: object) -> errors.EngineError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_samples_come_interleaved_each_gapless_with_its_own_end(tmp_path: Path) -> None:
    async with running_edge(tmp_path, script=by_sample) as edge:
        call = edge.stub.Generate(request_of(16))
        chunks = await collect(call)

        assert dict(await call.initial_metadata())["request-id"] == chunks[0].request_id
        usage = [0, 0, 0]
        for index in range(16):
            own = [chunk for chunk in chunks if chunk.sample_index == index]
            positions = [chunk.first_pos for chunk in own]
            counts = [len(chunk.token_ids) for chunk in own]
            assert positions == [sum(counts[:place]) for place in range(len(own))]
            assert "".join(chunk.text for chunk in own) == chr(97 + index) * (6 - index % 3)
            assert (own[0].request_id, own[0].client_tag) == (chunks[0].request_id, "mine")
            assert [chunk.HasField("finish") for chunk in own] == [False] * (len(own) - 1) + [True]
            assert own[-1].seed == 5
            numbers = (own[-1].usage.prompt_tokens, own[-1].usage.cached_tokens, own[-1].usage.output_tokens)
            usage = [total + number for total, number in zip(usage, numbers, strict=True)]
        assert usage == [3, 1, sum(6 - index % 3 for index in range(16))]
        submits = edge.core.submits
        assert [submit.sampling.sample_index for submit in submits] == list(range(16))
        assert len({submit.stream_id for submit in submits}) == 16
        assert len({submit.request_id for submit in submits}) == len({submit.sampling.seed for submit in submits}) == 1
        assert edge.link.num_streams == 0
        assert edge.metric("request_prompt_tokens_sum") == 3
        assert edge.metric("request_prompt_tokens_count") == 1


async def test_whole_answers_are_in_the_order_of_requests_and_samples(tmp_path: Path) -> None:
    async with running_edge(tmp_path, script=by_sample) as edge:
        requests = [request_of(2), request_of(1), request_of(3)]
        reply = await edge.stub.GenerateOnce(pb.GenerateOnceRequest(requests=requests))
        assert [generation.sample_index for generation in reply.generations] == [0, 1, 0, 0, 1, 2]
        assert [generation.text[0] for generation in reply.generations] == list("abaabc")
        ids = [generation.request_id for generation in reply.generations]
        assert ids == [ids[0]] * 2 + [ids[2]] + [ids[3]] * 3
        assert len(set(ids)) == 3
        assert [generation.usage.prompt_tokens for generation in reply.generations] == [3, 0, 3, 3, 0, 0]


async def test_an_abort_ends_all_samples_each_with_its_last_chunk(tmp_path: Path) -> None:
    async with running_edge(tmp_path, step_s=0.01) as edge:
        call = edge.stub.Generate(request_of(4, max_tokens=100))
        chunks = [await call.read()]
        await edge.stub.Abort(pb.AbortRequest(request_id=chunks[0].request_id))
        with pytest.raises(grpc.RpcError) as caught:
            await read_on(call, chunks)
        assert isinstance(from_rpc_error(caught.value), errors.RequestAborted)
        ends = {chunk.sample_index: chunk.finish.reason for chunk in chunks if chunk.HasField("finish")}
        assert ends == dict.fromkeys(range(4), FinishReason.FINISH_REASON_ABORT)
        async with asyncio.timeout(30):
            while len(edge.core.cancels) < 4:
                await asyncio.sleep(0.002)
        assert edge.link.num_streams == 0


async def test_leaving_the_call_ends_all_samples(tmp_path: Path) -> None:
    async with running_edge(tmp_path, step_s=0.01) as edge:
        call = edge.stub.Generate(request_of(5, max_tokens=100))
        await call.read()
        call.cancel()
        async with asyncio.timeout(30):
            while len(edge.core.cancels) < 5:
                await asyncio.sleep(0.002)
        assert {cancel.reason for cancel in edge.core.cancels} == {FinishReason.FINISH_REASON_ABORT}
        assert edge.link.num_streams == 0


async def test_a_refused_sample_refuses_the_call_and_ends_the_others(tmp_path: Path) -> None:
    async with running_edge(tmp_path) as edge:
        edge.core.refuse = StreamError(reason="QUEUE_FULL", message="full", retry_after_ms=7)
        error = await failure(edge.stub.Generate(request_of(3)).read())
        assert isinstance(error, errors.QueueFull)
        assert edge.link.num_streams == 0


async def test_more_samples_than_there_is_room_for_now_are_refused_whole(tmp_path: Path) -> None:
    async with running_edge(tmp_path, max_streams=4) as edge:
        edge.core.is_silent = True
        held = edge.stub.Generate(request_of(1))
        while edge.link.num_streams < 1:
            await asyncio.sleep(0.002)
        error = await failure(edge.stub.Generate(request_of(4)).read())
        assert isinstance(error, errors.QueueFull)
        assert error.retry_after_ms > 0
        assert edge.link.num_streams == 1
        held.cancel()
        edge.core.is_silent = False
        while edge.link.num_streams:
            await asyncio.sleep(0.002)
        assert len(await collect(edge.stub.Generate(request_of(4)))) >= 4


async def test_rules_reach_the_core(tmp_path: Path) -> None:
    async with running_edge(tmp_path) as edge:
        sampling = SamplingParameters(
            repetition_penalty=1.5,
            frequency_penalty=0.25,
            presence_penalty=-0.5,
            logit_bias={7: 1.5},
            banned_token_ids=[9],
        )
        await collect(edge.stub.Generate(pb.GenerateRequest(text="a", sampling=sampling)))
        asked = edge.core.submits[0].sampling
        assert (asked.repetition_penalty, asked.frequency_penalty, asked.presence_penalty) == (1.5, 0.25, -0.5)
        assert np.frombuffer(asked.bias_ids, "<u4").tolist() == [7]
        assert np.frombuffer(asked.banned_ids, "<u4").tolist() == [9]


async def test_a_grammar_is_tried_out_at_the_door(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    greeting = Greeting(
        tokenizer=str(write_tokenizer(tmp_path, tokenizer)),
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_ids=(tokenizer.token_to_id(EOS),),
        memory_bytes=256 << 20,
        cpu_s=2,
        cache_bytes=1 << 20,
    )
    checker = GrammarChecker(greeting)
    await checker.start()
    try:
        async with running_edge(tmp_path, grammars=checker) as edge:
            await collect(edge.stub.Generate(request_of(2, regex="a+")))
            kinds = [(submit.grammar.kind, submit.grammar.source) for submit in edge.core.submits]
            assert kinds == [("regex", "a+")] * 2
            error = await failure(edge.stub.Generate(request_of(1, json_schema='{"type": "nothing"}')).read())
            assert (type(error), error.field) == (errors.InvalidRequest, "json_schema")
            assert len(edge.core.submits) == 2
    finally:
        await checker.stop()


async def test_a_server_without_grammar_processes_says_so(tmp_path: Path) -> None:
    async with running_edge(tmp_path) as edge:
        error = await failure(edge.stub.Generate(request_of(1, regex="a")).read())
        assert (type(error), error.field) == (errors.UnsupportedFeature, "regex")
