"""The edge as callers see it, for real but for the core: gRPC on loopback and the bridge's Unix socket."""

import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.forwardplane.v1 import generate_pb2 as pb
from protos.forwardplane.v1.bridge_pb2 import CoreModel, StreamError
from protos.forwardplane.v1.sampling_pb2 import FinishReason, SamplingParameters, StopParameters
from protos.service.status import from_rpc_error
from protos.wire import errors
from tests.support.edge_harness import CHATML, running_edge
from tests.support.waiting import until

SERVICE = "forwardplane.v1.GenerationService"
SMILE = "🙂".encode()


def text_request(text: str = "abc", **stop: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, stop=StopParameters(**stop))


async def collect(call, into: list[pb.GenerateChunk] | None = None) -> list[pb.GenerateChunk]:
    """All chunks of a call; `into` has those that came before a status too."""
    chunks = [] if into is None else into
    while (chunk := await call.read()) is not grpc.aio.EOF:
        chunks.append(chunk)
    return chunks


def joined(chunks: list[pb.GenerateChunk]) -> tuple[list[int], str]:
    """Ids and text, after checking that the chunks fit each other."""
    ids: list[int] = []
    text = ""
    for chunk in chunks:
        assert chunk.first_pos == len(ids)
        assert chunk.text_offset == len(text.encode())
        ids += chunk.token_ids
        text += chunk.text
    return ids, text


async def refused(call) -> errors.EngineError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_a_stream_from_request_to_last_chunk(tmp_path: Path) -> None:
    async with running_edge(tmp_path) as edge:
        request = text_request("abc", max_tokens=20)
        request.client_tag = "mine"
        call = edge.stub.Generate(request)
        chunks = await collect(call)

        ids, text = joined(chunks)
        assert text == bytes(ids).decode()
        assert len(ids) == 20
        first, last = chunks[0], chunks[-1]
        assert (len(first.request_id), first.client_tag) == (32, "mine")
        metadata = dict(await call.initial_metadata())
        assert metadata["request-id"] == first.request_id == edge.core.submits[0].request_id
        assert not any(chunk.HasField("finish") for chunk in chunks[:-1])
        assert last.finish.reason == FinishReason.FINISH_REASON_LENGTH
        assert (last.usage.prompt_tokens, last.usage.cached_tokens, last.usage.output_tokens) == (3, 1, 20)
        assert last.seed == edge.core.submits[0].sampling.seed
        assert await call.code() == grpc.StatusCode.OK
        assert edge.core.cancels == []
        assert edge.metric("requests_total", method="Generate", code="OK") == 1
        assert edge.metric("time_to_first_token_seconds_count") == 1
        assert edge.metric("request_output_tokens_sum") == 20
        assert edge.metric("grpc_open_calls") == 0


async def test_what_the_core_is_asked(tmp_path: Path) -> None:
    async with running_edge(tmp_path) as edge:
        await collect(edge.stub.Generate(text_request()))
        sampling = SamplingParameters(temperature=0, top_k=5, seed=7)
        stop = StopParameters(max_tokens=4, stop_token_ids=[200, 100], ignore_eos=True)
        request = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=[1, 2]), sampling=sampling, stop=stop, logprobs=3)
        await collect(edge.stub.Generate(request, timeout=30))

        plain, full = edge.core.submits
        assert np.frombuffer(plain.prompt_ids, "<i4").tolist() == list(b"abc")
        assert plain.max_tokens == 125
        assert np.frombuffer(plain.stop_token_ids, "<u4").tolist() == [edge.eos_id]
        assert (round(plain.sampling.temperature, 3), round(plain.sampling.top_p, 3)) == (0.7, 0.9)
        assert plain.sampling.seed != 0
        assert 598_000 < plain.deadline_ms <= 600_000
        assert np.frombuffer(full.prompt_ids, "<i4").tolist() == [1, 2]
        assert (full.sampling.temperature, full.sampling.top_k, full.sampling.seed) == (0, 5, 7)
        assert full.max_tokens == 4
        assert np.frombuffer(full.stop_token_ids, "<u4").tolist() == [100, 200]
        assert 28_000 < full.deadline_ms < 31_000
        assert (full.output_logprobs, full.top_logprobs) == (True, 3)


async def test_end_of_sequence_is_counted_and_has_no_text(tmp_path: Path) -> None:
    async with running_edge(tmp_path) as edge:
        edge.core.script = lambda _: [97, 98, edge.eos_id, 99]
        for keep in (False, True):
            request = text_request()
            request.keep_special_tokens = keep
            chunks = await collect(edge.stub.Generate(request))
            assert joined(chunks) == ([97, 98, edge.eos_id], "ab")
            assert chunks[-1].finish.stop_token_id == edge.eos_id
            assert chunks[-1].usage.output_tokens == 3
        chunks = await collect(edge.stub.Generate(text_request(ignore_eos=True)))
        assert joined(chunks) == ([97, 98, edge.eos_id, 99], "abc")


async def test_characters_arrive_whole(tmp_path: Path) -> None:
    async with running_edge(tmp_path, script=lambda _: [97, *SMILE, 98, *SMILE[:3]]) as edge:
        chunks = await collect(edge.stub.Generate(text_request()))
        assert joined(chunks) == ([97, *SMILE, 98, *SMILE[:3]], "a🙂b\ufffd")
        assert not any("\ufffd" in chunk.text for chunk in chunks[:-1])


async def test_the_prompts_text_comes_back_when_asked_for(tmp_path: Path) -> None:
    async with running_edge(tmp_path, template=CHATML) as edge:
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hé")])
        prompts = {
            "hé<|im_end|>": pb.GenerateRequest(text="hé<|im_end|>", echo=True),
            "[user]hé[assistant]": pb.GenerateRequest(chat=chat, echo=True),
            "a<|im_end|>": pb.GenerateRequest(tokens=pb.TokenPrompt(ids=[97, edge.eos_id]), echo=True),
        }
        for text, request in prompts.items():
            chunks = await collect(edge.stub.Generate(request))
            assert [chunk.prompt_text for chunk in chunks if chunk.HasField("prompt_text")] == [text]
            assert chunks[0].HasField("prompt_text")
            assert chunks[0].text_offset == 0
            reply = await edge.stub.GenerateOnce(pb.GenerateOnceRequest(requests=[request, text_request()]))
            assert reply.generations[0].prompt_text == text
            assert not reply.generations[1].HasField("prompt_text")


async def test_a_stop_string_over_chunks_ends_the_stream_here_and_in_the_core(tmp_path: Path) -> None:
    async with running_edge(tmp_path, script=lambda _: list(b"one two END three END") * 5, step_s=0.005) as edge:
        chunks = await collect(edge.stub.Generate(text_request(stop_strings=["three END", "END", "xyz"])))
        ids, text = joined(chunks)
        assert text == "one two "
        assert bytes(ids) == b"one two END"
        finish, usage = chunks[-1].finish, chunks[-1].usage
        assert (finish.reason, finish.stop_string) == (FinishReason.FINISH_REASON_STOP, "END")
        assert usage.output_tokens == len(ids)
        await until(lambda: edge.core.cancels)
        assert edge.core.cancels[0].reason == FinishReason.FINISH_REASON_STOP
        assert not edge.core.streams


async def test_logprobs_come_with_their_ids(tmp_path: Path) -> None:
    async with running_edge(tmp_path, script=lambda _: [97, *SMILE, 98]) as edge:
        request = text_request()
        request.logprobs = 2
        chunks = await collect(edge.stub.Generate(request))
        for chunk in chunks:
            assert [item.token_id for item in chunk.logprobs] == list(chunk.token_ids)
            assert all([top.token_id for top in item.top] == [0, 1] for item in chunk.logprobs)


async def test_leaving_cancels_at_once(tmp_path: Path) -> None:
    async with running_edge(tmp_path, step_s=0.02) as edge:
        call = edge.stub.Generate(text_request())
        await call.read()
        call.cancel()
        await until(lambda: edge.core.cancels)
        assert edge.core.cancels[0].reason == FinishReason.FINISH_REASON_ABORT
        assert edge.link.num_streams == 0
        await until(lambda: edge.metric("requests_total", method="Generate", code="CANCELLED") == 1)


async def test_leaving_before_the_first_token_cancels_too(tmp_path: Path) -> None:
    async with running_edge(tmp_path, is_silent=True) as edge:
        call = edge.stub.Generate(text_request())
        reading = asyncio.ensure_future(call.read())
        await until(lambda: edge.core.submits)
        call.cancel()
        await until(lambda: edge.core.cancels)
        assert edge.link.num_streams == 0
        await asyncio.gather(reading, return_exceptions=True)


async def test_abort_ends_the_stream_with_what_there_is(tmp_path: Path) -> None:
    async with running_edge(tmp_path, step_s=0.005) as edge:
        call = edge.stub.Generate(text_request())
        chunks = [await call.read()]
        await edge.stub.Abort(pb.AbortRequest(request_id=chunks[0].request_id))
        error = await refused(collect(call, into=chunks))
        assert isinstance(error, errors.RequestAborted)
        ids, _ = joined(chunks)
        assert chunks[-1].finish.reason == FinishReason.FINISH_REASON_ABORT
        assert chunks[-1].usage.output_tokens == len(ids)
        await until(lambda: edge.core.cancels)
        again = await refused(edge.stub.Abort(pb.AbortRequest(request_id=chunks[0].request_id)))
        assert isinstance(again, errors.UnknownRequest)


async def test_the_callers_deadline_ends_the_stream(tmp_path: Path) -> None:
    async with running_edge(tmp_path, is_silent=True) as edge:
        call = edge.stub.Generate(text_request(), timeout=0.2)
        assert isinstance(await refused(call.read()), errors.DeadlinePassed)
        await until(lambda: edge.core.cancels)
        assert edge.link.num_streams == 0
        assert edge.core.submits[0].deadline_ms <= 200


async def test_the_cores_deadline_ends_the_stream_with_a_status(tmp_path: Path) -> None:
    async with running_edge(tmp_path, step_s=0.01) as edge:
        real_take = edge.core._take

        def take(message):
            for submit in message.submits:
                submit.deadline_ms = 1
            real_take(message)

        edge.core._take = take
        chunks: list[pb.GenerateChunk] = []
        error = await refused(collect(edge.stub.Generate(text_request()), into=chunks))
        assert isinstance(error, errors.DeadlinePassed)
        assert chunks[-1].finish.reason == FinishReason.FINISH_REASON_DEADLINE


async def test_a_refusal_of_the_core_reaches_the_caller_with_its_hint(tmp_path: Path) -> None:
    refusal = StreamError(reason="QUEUE_FULL", message="the queue holds 3 requests", retry_after_ms=250)
    async with running_edge(tmp_path, refuse=refusal) as edge:
        call = edge.stub.Generate(text_request())
        error = await refused(call.read())
        assert isinstance(error, errors.QueueFull)
        assert (error.message, error.retry_after_ms) == ("the queue holds 3 requests", 250)
        assert "request-id" not in dict(await call.initial_metadata())
        assert edge.link.num_streams == 0


async def test_s11_a_tag_is_echoed_and_never_a_key(tmp_path: Path) -> None:
    """Many requests of one tag, among them some that are cancelled: each of the others gets its own answer."""
    async with running_edge(tmp_path, step_s=0.002) as edge:
        requests = [text_request("abcdefgh"[index % 8] * (1 + index // 8), max_tokens=12) for index in range(160)]
        for request in requests:
            request.client_tag = "one"
        solo = [joined(await collect(edge.stub.Generate(request))) for request in requests[:8]]
        calls = [edge.stub.Generate(request) for request in requests]
        for call in calls[8::5]:
            call.cancel()
        kept = [call for index, call in enumerate(calls) if index < 8 or (index - 8) % 5]
        answers = await asyncio.gather(*(collect(call) for call in kept))
        assert {chunks[0].client_tag for chunks in answers} == {"one"}
        assert len({chunks[0].request_id for chunks in answers}) == len(kept)
        assert [joined(chunks) for chunks in answers[:8]] == solo
        assert all(len(joined(chunks)[0]) == 12 for chunks in answers)


async def test_the_cores_death_ends_every_stream(tmp_path: Path) -> None:
    async with running_edge(tmp_path, step_s=0.005) as edge:
        calls = [edge.stub.Generate(text_request()) for _ in range(3)]
        await asyncio.gather(*(call.read() for call in calls))
        edge.core.hang_up()
        for call in calls:
            assert isinstance(await refused(collect(call)), errors.UnavailableError)
        assert isinstance(await refused(edge.stub.Generate(text_request()).read()), errors.UnavailableError)
        assert isinstance(await refused(edge.stub.GetLoad(pb.GetLoadRequest())), errors.UnavailableError)


async def test_generate_once_answers_in_order(tmp_path: Path) -> None:
    async with running_edge(tmp_path) as edge:
        requests = [text_request(letter, max_tokens=count) for letter, count in zip("cab", (9, 3, 6), strict=True)]
        requests[1].client_tag = "second"
        reply = await edge.stub.GenerateOnce(pb.GenerateOnceRequest(requests=requests))
        assert [item.usage.output_tokens for item in reply.generations] == [9, 3, 6]
        assert [item.text for item in reply.generations] == ["vwxyzabcd", "tuv", "uvwxyz"]
        assert [item.client_tag for item in reply.generations] == ["", "second", ""]
        assert len({item.request_id for item in reply.generations}) == 3
        assert all(item.finish.reason == FinishReason.FINISH_REASON_LENGTH for item in reply.generations)


async def test_generate_once_is_all_or_nothing(tmp_path: Path) -> None:
    async with running_edge(tmp_path) as edge:
        bad = pb.GenerateOnceRequest(requests=[text_request(), text_request(max_tokens=0)])
        error = await refused(edge.stub.GenerateOnce(bad))
        assert (type(error), error.field) == (errors.InvalidRequest, "requests[1].stop.max_tokens")
        assert edge.core.submits == []

        edge.core.is_silent = True
        call = edge.stub.GenerateOnce(pb.GenerateOnceRequest(requests=[text_request(), text_request()]))
        await until(lambda: len(edge.core.submits) == 2)
        failed = edge.core.step()
        del failed.updates[0]
        failed.updates[0].error.reason = "NEVER_FITS"
        edge.core.send(failed)
        assert isinstance(await refused(call), errors.NeverFits)
        await until(lambda: edge.core.cancels)
        assert edge.link.num_streams == 0


async def test_generate_once_that_is_left_cancels_all(tmp_path: Path) -> None:
    async with running_edge(tmp_path, is_silent=True) as edge:
        call = edge.stub.GenerateOnce(pb.GenerateOnceRequest(requests=[text_request()] * 5))
        await until(lambda: len(edge.core.submits) == 5)
        call.cancel()
        await until(lambda: len(edge.core.cancels) == 5)
        assert edge.link.num_streams == 0


async def test_more_streams_than_the_limit_are_refused(tmp_path: Path) -> None:
    async with running_edge(tmp_path, max_streams=3, is_silent=True) as edge:
        held = edge.stub.GenerateOnce(pb.GenerateOnceRequest(requests=[text_request()]))
        await until(lambda: edge.link.num_streams == 1)
        error = await refused(edge.stub.GenerateOnce(pb.GenerateOnceRequest(requests=[text_request()] * 3)))
        assert isinstance(error, errors.QueueFull)
        assert error.retry_after_ms > 0
        assert edge.link.num_streams == 1
        await until(lambda: len(edge.core.cancels) == 2)
        held.cancel()


@pytest.mark.parametrize(
    ("limits", "setting"),
    [
        ({"max_streams": 5}, "5, max_streams"),
        (
            {"model": CoreModel(context_tokens=90, logits_width=300, serving=True, max_waiting_requests=5)},
            "5, max_waiting",
        ),
        ({"model": CoreModel(context_tokens=90, logits_width=300, serving=True, max_waiting_tokens=17)}, "18 tokens"),
    ],
    ids=["streams", "requests", "tokens"],
)
async def test_a_call_of_more_streams_than_ever_fit_is_refused_for_good(tmp_path: Path, limits, setting) -> None:
    async with running_edge(tmp_path, is_silent=True, **limits) as edge:
        samples = pb.GenerateRequest(text="abc", sampling=SamplingParameters(n=6))
        pair = pb.GenerateRequest(text="abc", sampling=SamplingParameters(n=2))
        for call, field in (
            (edge.stub.Generate(samples).read(), "sampling.n"),
            (edge.stub.GenerateOnce(pb.GenerateOnceRequest(requests=[samples])), "requests[0].sampling.n"),
            (edge.stub.GenerateOnce(pb.GenerateOnceRequest(requests=[pair] * 3)), "requests"),
        ):
            error = await refused(call)
            assert isinstance(error, errors.NeverFits)
            assert error.field == field
            assert error.message.startswith(f"{field} asks for 6 samples")
            assert setting in error.message
        assert not edge.core.submits


async def test_chat_goes_through_the_template(tmp_path: Path) -> None:
    async with running_edge(tmp_path, template=CHATML) as edge:
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
        await collect(edge.stub.Generate(pb.GenerateRequest(chat=chat, stop=StopParameters(max_tokens=2))))
        reply = await edge.stub.Tokenize(pb.TokenizeRequest(chat=chat))
        assert np.frombuffer(edge.core.submits[0].prompt_ids, "<i4").tolist() == list(reply.token_ids)
        text = await edge.stub.Detokenize(pb.DetokenizeRequest(token_ids=reply.token_ids))
        assert text.text == "[user]hi[assistant]"


async def test_an_endless_template_fails_its_request_only(tmp_path: Path) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    async with running_edge(tmp_path, template=endless) as edge:
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
        late = edge.stub.Generate(pb.GenerateRequest(chat=chat)).read()
        others = [collect(edge.stub.Generate(text_request(max_tokens=50))) for _ in range(3)]
        error, *answers = await asyncio.gather(refused(late), *others)
        assert isinstance(error, errors.InvalidRequest)
        assert "did not finish" in error.message
        assert all(joined(chunks)[1] for chunks in answers)


async def test_text_calls_and_descriptions(tmp_path: Path) -> None:
    async with running_edge(tmp_path) as edge:
        ids = (await edge.stub.Tokenize(pb.TokenizeRequest(text="hello 🙂" * 1000))).token_ids
        assert (await edge.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == "hello 🙂" * 1000
        broken = await edge.stub.Detokenize(pb.DetokenizeRequest(token_ids=[97, 0xF0]))
        assert broken.text == "a\ufffd"
        special = pb.DetokenizeRequest(token_ids=[edge.eos_id], keep_special_tokens=True)
        assert (await edge.stub.Detokenize(special)).text == "<|im_end|>"
        model = await edge.stub.GetModel(pb.GetModelRequest())
        assert (model.name, model.context_tokens, model.vocab_size, model.logits_width) == ("tiny", 128, 280, 300)
        assert (model.dtype, model.numerics, list(model.eos_token_ids)) == ("float32", "reproducible", [edge.eos_id])
        assert not model.has_chat_template
        loads = await asyncio.gather(*(edge.stub.GetLoad(pb.GetLoadRequest()) for _ in range(3)))
        assert [load.kv_usage for load in loads] == [0.25] * 3


async def test_a_flush_reaches_the_core_and_its_answer_the_caller(tmp_path: Path) -> None:
    async with running_edge(tmp_path) as edge:
        assert (await edge.stub.FlushCache(pb.FlushCacheRequest())).freed_pages == 7


def salted(salt: str | None) -> pb.GenerateRequest:
    request = text_request(max_tokens=1)
    request.MergeFrom(pb.GenerateRequest(cache_salt=salt, priority=-2))
    return request


async def test_the_core_is_told_whose_prefixes_a_request_may_use(tmp_path: Path) -> None:
    async with running_edge(tmp_path) as edge:
        for salt in (None, "", "a", "a", "b"):
            await collect(edge.stub.Generate(salted(salt)))
        none, empty, first, same, other = [submit.isolation_domain for submit in edge.core.submits]
        assert none == empty
        assert first == same
        assert len({none, first, other}) == 3
        assert {len(domain) for domain in (none, first, other)} == {16}
        assert {submit.priority for submit in edge.core.submits} == {-2}


async def test_two_hundred_streams_at_once(tmp_path: Path) -> None:
    async with running_edge(tmp_path, step_s=0.01) as edge:
        requests = [text_request(chr(97 + index % 26), max_tokens=20) for index in range(200)]
        answers = await asyncio.gather(*(collect(edge.stub.Generate(request)) for request in requests))
        for index, chunks in enumerate(answers):
            first = 97 + (97 + index % 26) % 26
            assert joined(chunks)[0] == [97 + (first - 97 + step) % 26 for step in range(20)]
        assert edge.link.num_streams == 0
        assert len({chunks[0].request_id for chunks in answers}) == 200


async def test_a_slow_reader_gets_merged_chunks_and_slows_nobody(tmp_path: Path) -> None:
    async with running_edge(tmp_path) as edge:
        slow = edge.stub.Generate(text_request(max_tokens=100))
        await slow.read()
        quick = await collect(edge.stub.Generate(text_request(max_tokens=100)))
        assert len(joined(quick)[0]) == 100
        rest = await collect(slow)
        assert rest[-1].usage.output_tokens == 100


async def test_a_reader_who_stops_is_ended_and_the_others_do_not_notice(tmp_path: Path) -> None:
    model = CoreModel(context_tokens=1 << 20, logits_width=300, max_logprobs=20, serving=True)
    async with running_edge(tmp_path, model=model, ids_per_step=200) as edge:
        stuck = edge.stub.Generate(pb.GenerateRequest(text="abc", logprobs=0))
        await stuck.read()
        others = asyncio.gather(*(collect(edge.stub.Generate(text_request(max_tokens=5000))) for _ in range(3)))
        await until(lambda: edge.core.cancels, timeout_s=30)
        assert [len(joined(chunks)[0]) for chunks in await others] == [5000] * 3
        assert edge.link.num_streams == 0
        error = await refused(collect(stuck))
        assert type(error) is errors.CapacityError
        assert "reads too slowly" in error.message


async def test_nothing_is_left_of_many_requests_however_they_end(tmp_path: Path) -> None:
    async with running_edge(tmp_path, step_s=0.002) as edge:
        descriptors = Path("/proc/self/fd")

        async def leave(request: pb.GenerateRequest) -> None:
            call = edge.stub.Generate(request)
            await call.read()
            call.cancel()

        async def one_of_each() -> None:
            await asyncio.gather(
                collect(edge.stub.Generate(text_request(max_tokens=3))),
                collect(edge.stub.Generate(text_request(stop_strings=["w", "x"]))),
                leave(text_request()),
                refused(edge.stub.Generate(text_request(max_tokens=0)).read()),
                refused(collect(edge.stub.Generate(text_request(), timeout=0.05))),
                edge.stub.GenerateOnce(pb.GenerateOnceRequest(requests=[text_request(max_tokens=2)] * 2)),
            )

        await one_of_each()
        await until(lambda: edge.link.num_streams == 0)
        tasks, open_before = len(asyncio.all_tasks()), len(list(descriptors.iterdir()))
        for _ in range(5):
            await asyncio.gather(*(one_of_each() for _ in range(10)))
        await until(lambda: edge.link.num_streams == 0 and not edge.core.streams)
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        assert len(list(descriptors.iterdir())) <= open_before
        assert edge.metric("grpc_open_calls") == 0
        assert edge.metric("held_request_bytes") == edge.metric("caller_held_request_bytes") == 0
        call = edge.stub.Generate(text_request(max_tokens=100))
        await call.read()
        assert edge.metric("held_request_bytes") == edge.core.submits[-1].ByteSize()
        call.cancel()


async def test_health_follows_the_core(tmp_path: Path) -> None:
    async with running_edge(tmp_path) as edge:
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        async with grpc.aio.insecure_channel(f"127.0.0.1:{edge.server.health_port}") as probe:
            for channel in (edge.channel, probe):
                health = health_pb2_grpc.HealthStub(channel)
                assert (await health.Check(health_pb2.HealthCheckRequest())).status == serving
            watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert (await watch.read()).status == serving
            edge.core.set_serving(is_serving=False)
            assert (await watch.read()).status == not_serving
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == serving
            assert isinstance(await refused(edge.stub.Generate(text_request()).read()), errors.Loading)
            edge.core.set_serving(is_serving=True)
            assert (await watch.read()).status == serving
            await collect(edge.stub.Generate(text_request()))
            watch.cancel()


async def test_draining_lets_running_streams_finish(tmp_path: Path) -> None:
    async with running_edge(tmp_path, step_s=0.005) as edge:
        call = edge.stub.Generate(text_request(max_tokens=40))
        first = await call.read()
        draining = asyncio.create_task(edge.server.drain(timeout_s=10))
        await asyncio.sleep(0)
        error = await refused(edge.stub.Generate(text_request()).read())
        assert isinstance(error, errors.Draining)
        health = health_pb2_grpc.HealthStub(edge.channel)
        reply = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert len(joined([first, *await collect(call)])[0]) == 40
        await draining


async def test_draining_cuts_off_what_does_not_finish(tmp_path: Path) -> None:
    async with running_edge(tmp_path, is_silent=True) as edge:
        call = edge.stub.Generate(text_request())
        reading = asyncio.ensure_future(refused(call.read()))
        await until(lambda: edge.core.submits)
        await edge.server.drain(timeout_s=0.1)
        assert isinstance(await reading, errors.Draining)
        await until(lambda: edge.core.cancels)


async def test_reflection_names_the_service(tmp_path: Path) -> None:
    async with running_edge(tmp_path) as edge:
        stub = reflection_pb2_grpc.ServerReflectionStub(edge.channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        reply = await call.read()
        assert SERVICE in [service.name for service in reply.list_services_response.service]
        await call.done_writing()


@pytest.mark.parametrize(
    ("request_", "error_class", "field"),
    [
        (pb.GenerateRequest(text=""), errors.InvalidRequest, "text"),
        (pb.GenerateRequest(tokens=pb.TokenPrompt(ids=[300])), errors.InvalidRequest, "tokens.ids[0]"),
        (text_request(max_tokens=126), errors.InvalidRequest, "stop.max_tokens"),
        (pb.GenerateRequest(text="a", sampling=SamplingParameters(top_p=0)), errors.InvalidRequest, "sampling.top_p"),
        (
            pb.GenerateRequest(text="a", sampling=SamplingParameters(temperature=float("nan"))),
            errors.InvalidRequest,
            "sampling.temperature",
        ),
        (
            pb.GenerateRequest(text="a", sampling=SamplingParameters(repetition_penalty=0)),
            errors.InvalidRequest,
            "sampling.repetition_penalty",
        ),
        (pb.GenerateRequest(text="a", model="other"), errors.UnknownModel, "model"),
        (
            pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])),
            errors.UnsupportedFeature,
            "chat",
        ),
        (pb.GenerateRequest(text="a" * (3 << 20)), errors.InvalidRequest, "text"),
        (pb.GenerateRequest(text="a" * (10 << 20)), errors.MessageTooLarge, ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_input_of_the_issue(tmp_path: Path, request_, error_class, field) -> None:
    async with running_edge(tmp_path, step_s=0.002) as edge:
        other = asyncio.create_task(collect(edge.stub.Generate(text_request(max_tokens=100))))
        await until(lambda: edge.core.streams)
        error = await refused(edge.stub.Generate(request_).read())
        assert (type(error), error.field) == (error_class, field)
        assert len(joined(await other)[0]) == 100
        assert len(edge.core.submits) == 1
