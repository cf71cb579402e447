"""The worker's gRPC service: messages in, frozen types to the protocol's shell, answers out. Decides nothing."""

import asyncio
from collections.abc import AsyncIterator

from typing_extensions import override

from protos.forwardplane.v1.worker_pb2 import (
    AttachReply,
    AttachRequest,
    DrainReply,
    DrainRequest,
    ExecuteReply,
    ExecuteRequest,
    ReportRequest,
    WorkerReport,
)
from protos.forwardplane.v1.worker_pb2_grpc import WorkerServiceServicer
from protos.service.status import Context, fault_border
from protos.wire.codec import worker_info_to_proto
from protos.wire.enums import WorkerState
from protos.wire.errors import DataFault, EngineError, Loading
from protos.wire.limits import MAX_REQUIRED_FEATURES
from worker_svc.protocol.messages import AttachCall, StreamOpening
from worker_svc.rpc.plan_intake import PlanIntake
from worker_svc.rpc.plan_stream import PlanStream
from worker_svc.rpc.protocol_loop import ProtocolLoop
from worker_svc.rpc.reports import Reporter, state_message
from worker_svc.rpc.worker_status import WorkerStatus

MAX_REASON_CHARS = 256


class WorkerServicer(WorkerServiceServicer):
    """One per process; refuses work with LOADING until `serve`."""

    def __init__(self, status: WorkerStatus, reporter: Reporter) -> None:
        self._status = status
        self._reporter = reporter
        self._loaded: tuple[ProtocolLoop, PlanIntake] | None = None

    def serve(self, loop: ProtocolLoop, intake: PlanIntake) -> None:
        """The worker is loaded."""
        self._loaded = (loop, intake)

    @override
    async def Attach(self, request: AttachRequest, context: Context) -> AttachReply:
        """Start of an (epoch, term)."""
        loop, _ = self._parts()
        asked = AttachCall(
            epoch=request.epoch,
            term=request.term,
            protocol_min=request.protocol_min,
            protocol_max=request.protocol_max,
            features=tuple(request.features[:MAX_REQUIRED_FEATURES]),
            scheduler_name=request.scheduler_name[:MAX_REASON_CHARS],
        )
        return worker_info_to_proto(await loop.attach(asked))

    @override
    async def Execute(
        self, request_iterator: AsyncIterator[ExecuteRequest], context: Context
    ) -> AsyncIterator[ExecuteReply]:
        """The plan stream."""
        loop, intake = self._parts()
        stream = loop.new_stream()
        reading = asyncio.create_task(_read(request_iterator, stream, loop=loop, intake=intake), name="plan stream")
        try:
            async for reply in stream.replies():
                yield reply
        finally:
            loop.close_stream(stream)
            reading.cancel()
            await asyncio.wait({reading})

    @override
    async def Report(self, request: ReportRequest, context: Context) -> AsyncIterator[WorkerReport]:
        """The heartbeat."""
        async for report in self._reporter.reports(request.interval_ms):
            yield report

    @override
    async def Drain(self, request: DrainRequest, context: Context) -> DrainReply:
        """Announce departure; plans still run, so that the scheduler can move what is left."""
        loop, _ = self._parts()
        loop.drain(request.reason[:MAX_REASON_CHARS] or "drain requested")
        await self._status.set(WorkerState.DRAINING)
        return DrainReply(state=state_message(self._status.state))

    def _parts(self) -> tuple[ProtocolLoop, PlanIntake]:
        if self._loaded is None:
            raise Loading("the worker is loading its weights")
        return self._loaded


async def _read(
    requests: AsyncIterator[ExecuteRequest], stream: PlanStream, *, loop: ProtocolLoop, intake: PlanIntake
) -> None:
    """Hand over what the caller sends, no faster than it reads its answers."""
    try:
        with fault_border("plan stream"):
            async for request in requests:
                _hand_over(request, stream, loop=loop, intake=intake)
                await stream.room()
    except EngineError as error:
        loop.receive_unreadable(stream, error)
    else:
        loop.requests_ended(stream)


def _hand_over(request: ExecuteRequest, stream: PlanStream, *, loop: ProtocolLoop, intake: PlanIntake) -> None:
    if request.HasField("plan"):
        loop.receive(stream, intake.read(request.plan))
        return
    if not request.HasField("open"):
        raise DataFault("a message of the plan stream holds neither an opening nor a plan", field="request")
    opening = StreamOpening(
        epoch=request.open.epoch,
        term=request.open.term,
        incarnation=request.open.incarnation,
        stream_number=request.open.stream_number,
    )
    loop.open_stream(stream, opening)
