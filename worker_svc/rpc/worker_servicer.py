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
from protos.service.handlers import Context
from protos.wire.codec import worker_info_to_proto
from protos.wire.errors import Loading
from protos.wire.limits import MAX_REQUIRED_FEATURES
from worker_svc.protocol.messages import AttachCall
from worker_svc.rpc.plan_intake import PlanIntake
from worker_svc.rpc.plan_reader import read_plans
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
        return worker_info_to_proto(self._reporter.current(await loop.attach(attach_call(request))))

    @override
    async def Execute(
        self, request_iterator: AsyncIterator[ExecuteRequest], context: Context
    ) -> AsyncIterator[ExecuteReply]:
        """The plan stream."""
        loop, intake = self._parts()
        stream = loop.new_stream()
        reading = asyncio.create_task(
            read_plans(request_iterator, stream, loop=loop, intake=intake), name="plan stream"
        )
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
        await self._status.drain()
        return DrainReply(state=state_message(self._status.state))

    def _parts(self) -> tuple[ProtocolLoop, PlanIntake]:
        if self._loaded is None:
            raise Loading("the worker is loading its weights")
        return self._loaded


def attach_call(request: AttachRequest) -> AttachCall:
    """What the protocol is asked. Lists and texts of any length are cut."""
    return AttachCall(
        epoch=request.epoch,
        term=request.term,
        protocol_min=request.protocol_min,
        protocol_max=request.protocol_max,
        features=tuple(request.features[:MAX_REQUIRED_FEATURES]),
        scheduler_name=request.scheduler_name[:MAX_REASON_CHARS],
    )
