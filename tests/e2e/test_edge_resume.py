"""Streams that go on at another edge: the real core behind each, the caller's side made of raw messages."""

import time
from pathlib import Path

import grpc
import pytest

from protos.forwardplane.v1 import generate_pb2 as pb
from protos.forwardplane.v1.sampling_pb2 import SamplingParameters, StopParameters
from protos.service.status import from_rpc_error
from protos.wire.errors import EngineError
from scheduler_svc.edge.resume_tickets import TicketDesk
from tests.support.core_harness import small_info
from tests.support.edge_harness import running_edge
from tests.support.real_core import RealCore

KEY = bytes(range(32))
DESK = TicketDesk([KEY], unix_clock=time.time)
REQUEST = pb.GenerateRequest(
    text="abcdef",
    sampling=SamplingParameters(n=2, temperature=0.9, repetition_penalty=1.1),
    stop=StopParameters(max_tokens=12, stop_strings=["never"], ignore_eos=True),
    logprobs=1,
    echo=True,
)


def core(folder: Path) -> RealCore:
    folder.mkdir(exist_ok=True)
    return RealCore(folder / "core.sock", small_info(logits_width=280, window=2), step_s=0.003)


async def chunks_of(stub: object, request: pb.GenerateRequest) -> list[pb.GenerateChunk]:
    return [chunk async for chunk in stub.Generate(request)]


class Held:
    """What has come of one sample."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.logprobs: list[float] = []
        self.prompt_texts: list[str] = []
        self.has_begun = False

    def take(self, chunk: pb.GenerateChunk) -> None:
        assert chunk.first_pos == len(self.ids) or not chunk.token_ids
        self.has_begun = True
        self.ids += chunk.token_ids
        self.text += chunk.text
        self.logprobs += [one.logprob for one in chunk.logprobs]
        self.prompt_texts += [chunk.prompt_text] if chunk.HasField("prompt_text") else []

    def resumed(self, ticket: bytes) -> pb.ResumedSample:
        return pb.ResumedSample(
            ticket=ticket,
            token_ids=self.ids,
            text_bytes=len(self.text.encode()),
            has_begun=self.has_begun,
        )


def held_after(chunks: list[pb.GenerateChunk], index: int) -> Held:
    held = Held()
    for chunk in chunks:
        if chunk.sample_index == index:
            held.take(chunk)
    return held


async def test_from_every_chunk_on_the_rest_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    async with running_edge(tmp_path, real_core=core(tmp_path), tickets=DESK) as edge:
        whole = await chunks_of(edge.stub, REQUEST)
    tickets = whole[0].resume_tickets
    assert len(tickets) == 2
    assert len(whole) > 6
    assert not any(chunk.resume_tickets for chunk in whole[1:])
    expected = [held_after(whole, index) for index in range(2)]
    async with running_edge(tmp_path / "b", real_core=core(tmp_path / "b"), tickets=DESK) as edge:
        for cut in range(1, len(whole)):
            samples = [held_after(whole[:cut], index) for index in range(2)]
            ended = {chunk.sample_index for chunk in whole[:cut] if chunk.HasField("finish")}
            left = [index for index in range(2) if index not in ended]
            request = pb.GenerateRequest(resume=[samples[index].resumed(tickets[index]) for index in left])
            request.MergeFrom(REQUEST)
            rest = await chunks_of(edge.stub, request)
            for chunk in rest:
                assert chunk.sample_index in left
                samples[chunk.sample_index].take(chunk)
            assert [vars(held) for held in samples] == [vars(held) for held in expected]
            assert list(rest[0].resume_tickets) == [tickets[index] for index in left]
            assert rest[0].request_id == whole[0].request_id
            assert {chunk.seed for chunk in rest if chunk.HasField("finish")} == {whole[-1].seed}


async def refusal(stub: object, request: pb.GenerateRequest) -> EngineError:
    with pytest.raises(grpc.RpcError) as caught:
        await chunks_of(stub, request)
    return from_rpc_error(caught.value)


def changed(item: pb.ResumedSample, **fields: object) -> pb.GenerateRequest:
    own = pb.ResumedSample()
    own.CopyFrom(item)
    own.MergeFrom(pb.ResumedSample(**fields))
    request = pb.GenerateRequest(resume=[own])
    request.MergeFrom(REQUEST)
    return request


async def test_what_cannot_be_resumed_is_refused_by_name(tmp_path: Path) -> None:
    async with running_edge(tmp_path, real_core=core(tmp_path), tickets=DESK) as edge:
        whole = await chunks_of(edge.stub, REQUEST)
        item = held_after(whole[:-1], 0).resumed(whole[0].resume_tickets[0])
        other = changed(item)
        other.priority = 3
        for request, reason, field in (
            (other, "TICKET_REFUSED", "resume"),
            (changed(item, text_bytes=item.text_bytes + 1), "INVALID_REQUEST", "resume.text_bytes"),
            (changed(item, token_ids=[280]), "INVALID_REQUEST", f"resume[0].token_ids[{len(item.token_ids)}]"),
            (changed(item, token_ids=[97] * 12), "INVALID_REQUEST", "resume.token_ids"),
            (changed(pb.ResumedSample()), "INVALID_REQUEST", "resume[0].ticket"),
        ):
            error = await refusal(edge.stub, request)
            assert (error.reason, error.field) == (reason, field)
        with pytest.raises(grpc.RpcError) as caught:
            await edge.stub.GenerateOnce(pb.GenerateOnceRequest(requests=[changed(item)]))
        assert from_rpc_error(caught.value).field == "requests[0].resume"
    async with running_edge(tmp_path / "b", real_core=core(tmp_path / "b")) as edge:
        assert (await refusal(edge.stub, changed(item))).reason == "UNSUPPORTED"
        assert not (await chunks_of(edge.stub, REQUEST))[0].resume_tickets
