"""WorkerService over an exact fake worker, in this process, with faults on request. One plan at a time, in order."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
from typing_extensions import override

from protos.forwardplane.v1.worker_pb2 import (
    AttachReply,
    ExecuteReply,
    Opened,
    ResultMessage,
    WorkerReport,
)
from protos.forwardplane.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from protos.service.access import AccessInterceptor, PeerRoles, admit_everybody
from protos.service.credentials import server_credentials
from protos.service.server import PortProfile, ServerOptions, bind_port, build_server
from protos.service.status import StatusInterceptor
from protos.service.tls_files import TlsFolder
from protos.wire.codec import buckets_to_proto, checksum, decode_plan, encode_result, open_message, worker_info_to_proto
from protos.wire.enums import WorkerState
from protos.wire.errors import EngineError, StaleEpoch
from protos.wire.plan import ForwardPlan
from protos.wire.worker_info import Buckets, WorkerInfo
from tests.support.fake_worker import FakeWorker

NOTHING = ExecuteReply()
"""As the answer to a plan: none at all."""


class FakeWorkerServer(WorkerServiceServicer):
    """Serves one worker. Its attributes are what a test may change or look at."""

    def __init__(self, info: WorkerInfo, *, tls: Path | None = None) -> None:
        self.info = info
        self._tls = None if tls is None else TlsFolder(tls, needs_authority=True)
        self.worker = FakeWorker(info)
        self.highest = (0, 0)
        self.attaches: list[tuple[int, int]] = []
        self.expected_seq_at_open: int | None = None
        """None: what the worker has not executed."""
        self.openings: list[tuple[int, int, int]] = []
        self._results: dict[int, ExecuteReply] = {}
        self.answer: Callable[[ForwardPlan], ExecuteReply | EngineError | None] = lambda plan: None
        """What to answer to a plan instead of its result; an error ends the stream."""
        self.released = asyncio.Event()
        """Cleared: reports go on, but no plan is executed and the counter stands still."""
        self.released.set()
        self.reports_stopped = False
        self.state = WorkerState.SERVING
        self.buckets: tuple[Buckets, ...] = ()
        """As reports say; at Attach those of `info`."""
        self._counter = 0
        self._server: grpc.aio.Server | None = None
        self._streams: list[asyncio.Event] = []

    async def start(self, port: int = 0) -> str:
        """Listen; the address."""
        admit = admit_everybody if self._tls is None else PeerRoles("forwardplane")
        self._server = build_server(
            options=ServerOptions(profile=PortProfile.PLAN),
            interceptors=[StatusInterceptor(), AccessInterceptor(admit)],
        )
        add_WorkerServiceServicer_to_server(self, self._server)
        credentials = None if self._tls is None else server_credentials(self._tls, needs_client=True)
        bound = bind_port(self._server, "127.0.0.1", port, credentials=credentials)
        await self._server.start()
        return f"127.0.0.1:{bound}"

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def break_streams(self) -> None:
        """End every plan stream that is open."""
        for stream in self._streams:
            stream.set()

    @override
    async def Attach(self, request, context) -> AttachReply:
        pair = (request.epoch, request.term)
        if pair <= self.highest:
            highest_epoch, highest_term = self.highest
            raise StaleEpoch("an older scheduler", highest_epoch=highest_epoch, highest_term=highest_term)
        self.highest = pair
        self.attaches.append(pair)
        self.worker.reset()
        self._results.clear()
        return worker_info_to_proto(self.info)

    @override
    async def Execute(self, requests, context) -> AsyncIterator[ExecuteReply]:
        broken = asyncio.Event()
        self._streams.append(broken)
        iterator = aiter(requests)
        opening = (await anext(iterator)).open
        assert opening.incarnation == self.info.incarnation
        pair = (opening.epoch, opening.term)
        assert pair == self.highest
        self.openings.append((*pair, opening.stream_number))
        expected_seq = self.expected_seq_at_open or self.worker.next_seq
        yield ExecuteReply(opened=Opened(expected_seq=expected_seq))
        while (request := await _next_unless(iterator, broken)) is not None:
            if pair != self.highest:
                raise StaleEpoch("another scheduler", highest_epoch=self.highest[0], highest_term=self.highest[1])
            plan = decode_plan(open_message(request.plan.body, request.plan.crc32))
            await self.released.wait()
            reply = self._reply(plan)
            if isinstance(reply, EngineError):
                raise reply
            if reply is not NOTHING:
                yield reply

    @override
    async def Report(self, request, context) -> AsyncIterator[WorkerReport]:
        while True:
            if not self.reports_stopped:
                yield WorkerReport(
                    incarnation=self.info.incarnation,
                    state=int(self.state),
                    device_counter=self._counter,
                    buckets=buckets_to_proto(self.buckets),
                )
            await asyncio.sleep(request.interval_ms / 1000)

    def _reply(self, plan: ForwardPlan) -> ExecuteReply | EngineError | None:
        other = self.answer(plan)
        if other is not None:
            return other
        seq = plan.identity.seq
        if seq not in self._results:
            body = encode_result(self.worker.execute(plan))
            self._results[seq] = ExecuteReply(result=ResultMessage(body=body, crc32=checksum(body)))
            self._counter += 1
        return self._results[seq]


async def _next_unless(iterator, broken: asyncio.Event):
    """The next request; None when there is none, or when `broken` is set first."""
    following = asyncio.ensure_future(anext(iterator, None))
    waiting = asyncio.ensure_future(broken.wait())
    try:
        await asyncio.wait({following, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return following.result() if following.done() else None
    finally:
        following.cancel()
        waiting.cancel()
        await asyncio.gather(following, waiting, return_exceptions=True)
