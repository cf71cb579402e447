"""Two edges in one event loop over the real core: what a caller asks of one holds for requests of the other."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from protos.forwardplane.v1 import generate_pb2 as pb
from protos.forwardplane.v1.bridge_pb2 import CoreModel
from protos.forwardplane.v1.sampling_pb2 import FinishReason, SamplingParameters, StopParameters
from protos.service.status import from_rpc_error
from protos.wire.errors import RequestAborted, UnknownRequest
from tests.support.core_harness import small_info
from tests.support.edge_harness import running_edge
from tests.support.real_core import RealCore


@dataclass
class Started:
    """A core for a second edge: the first one's."""

    core: RealCore

    @property
    def path(self) -> Path:
        return self.core.path

    @property
    def model(self) -> CoreModel:
        return self.core.model

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass


async def read_on(call: grpc.aio.UnaryStreamCall, chunks: list[pb.GenerateChunk]) -> None:
    while (chunk := await call.read()) is not grpc.aio.EOF:
        chunks.append(chunk)


async def test_an_abort_at_the_other_edge_ends_every_sample_and_frees_the_core(tmp_path: Path) -> None:
    core = RealCore(tmp_path / "core.sock", small_info(num_pages=600, logits_width=300, context_tokens=2000))
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    async with running_edge(one, real_core=core) as first, running_edge(two, real_core=Started(core)) as second:
        stop = StopParameters(max_tokens=900, ignore_eos=True)
        request = pb.GenerateRequest(text="abc", stop=stop, sampling=SamplingParameters(n=2))
        call = first.stub.Generate(request)
        chunks = [await call.read()]
        await second.stub.Abort(pb.AbortRequest(request_id=chunks[0].request_id))
        with pytest.raises(grpc.RpcError) as ended:
            await read_on(call, chunks)
        assert isinstance(from_rpc_error(ended.value), RequestAborted)
        ends = {chunk.sample_index: chunk.finish.reason for chunk in chunks if chunk.HasField("finish")}
        assert ends == dict.fromkeys((0, 1), FinishReason.FINISH_REASON_ABORT)
        async with asyncio.timeout(30):
            while core.books.streams:
                await asyncio.sleep(0.005)
        for edge in (first, second):
            with pytest.raises(grpc.RpcError) as again:
                await edge.stub.Abort(pb.AbortRequest(request_id=chunks[0].request_id))
            assert isinstance(from_rpc_error(again.value), UnknownRequest)
