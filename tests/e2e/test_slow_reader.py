"""A reader who stops reading, through gRPC, edge, bridge and the real core: paused, then ended; others go on."""

import asyncio
from pathlib import Path

import grpc
import pytest

from protos.forwardplane.v1 import generate_pb2 as pb
from protos.forwardplane.v1.generate_pb2_grpc import GenerationServiceStub
from protos.forwardplane.v1.sampling_pb2 import SamplingParameters, StopParameters
from protos.service.status import from_rpc_error
from protos.wire.errors import CapacityError
from scheduler_svc.core.events import StreamKey
from scheduler_svc.edge.slow_readers import ReaderLimits
from tests.support.core_harness import make_spec, oracle, small_info
from tests.support.edge_harness import Edge, running_edge
from tests.support.plans import full_sub_pool
from tests.support.real_core import RealCore
from tests.support.waiting import until

PAGE_SIZE, PAGES = 16, 600
MATES, MATE_TOKENS = 3, 60
LONG = 1500
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
"""Of the reader who stops, so that little is on its way to it."""


def request(token_id: int, *, max_tokens: int, logprobs: int | None = None) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokens=pb.TokenPrompt(ids=[token_id, 5]),
        sampling=SamplingParameters(temperature=0),
        stop=StopParameters(max_tokens=max_tokens, ignore_eos=True),
        logprobs=logprobs,
    )


async def drain(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def ids_of(edge: Edge, token_id: int) -> list[int]:
    call = edge.stub.Generate(request(token_id, max_tokens=MATE_TOKENS))
    return [one async for chunk in call for one in chunk.token_ids]


@pytest.fixture
def core(tmp_path: Path) -> RealCore:
    info = small_info(
        sub_pools=(full_sub_pool(num_pages=PAGES, page_size=PAGE_SIZE),), context_tokens=LONG + 100, logits_width=300
    )
    return RealCore(tmp_path / "core.sock", info)


async def test_a_reader_who_stops_is_paused_then_ended_and_the_others_do_not_notice(tmp_path, core):
    limits = ReaderLimits(pause_ids=64, resume_ids=8, paused_s=3.0)
    async with (
        running_edge(tmp_path, real_core=core, reader_limits=limits) as edge,
        grpc.aio.insecure_channel(f"127.0.0.1:{edge.server.port}", options=SMALL_WINDOW) as channel,
    ):
        stuck = GenerationServiceStub(channel).Generate(request(7, max_tokens=LONG, logprobs=20))
        await stuck.read()
        (key,) = core.books.streams
        await until(lambda: core.books.streams[key].standing.is_paused, timeout_s=60)
        found = await asyncio.gather(*(ids_of(edge, 20 + mate) for mate in range(MATES)))
        is_still_paused = key in core.books.streams
        await until(lambda: not core.books.streams, timeout_s=60)
        with pytest.raises(grpc.RpcError) as caught:
            await drain(stuck)
        workers = list(core.books.workers.values())

    assert is_still_paused
    assert found == [expected(core, 20 + mate) for mate in range(MATES)]
    error = from_rpc_error(caught.value)
    assert isinstance(error, CapacityError)
    assert "tokens have waited for 3 s" in error.message
    assert all(not worker.running for worker in workers)
    assert core.books.gauges().workers[0].pages_used == (0,)


def expected(core: RealCore, token_id: int) -> list[int]:
    spec = make_spec(1, prompt=[token_id, 5], max_tokens=MATE_TOKENS)
    assert spec.stream == StreamKey(0, 1)
    return oracle(core.info, spec)
