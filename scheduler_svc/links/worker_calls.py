"""The calls of WorkerService as the links need them: frozen types in, frozen types and the taxonomy's errors out.

The only code of the links that knows messages and grpc. Knows nothing of order, liveness or terms.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

import grpc

from protos.forwardplane.v1.worker_pb2 import (
    AttachRequest,
    ExecuteOpen,
    ExecuteReply,
    ExecuteRequest,
    PlanMessage,
    ReportRequest,
    WorkerReport,
)
from protos.forwardplane.v1.worker_pb2_grpc import WorkerServiceStub
from protos.service.status import from_rpc_error
from protos.wire.codec import buckets_from_proto, decode_result, open_message, worker_info_from_proto
from protos.wire.enums import Feature, WorkerState
from protos.wire.errors import UnavailableError
from protos.wire.limits import PROTOCOL_MAX, PROTOCOL_MIN
from scheduler_svc.links.link_messages import (
    DrainAnnounced,
    EncodedPlan,
    FullPlanNeeded,
    LinkNack,
    PlansMissing,
    Report,
    StreamAnswer,
    Term,
)

if TYPE_CHECKING:  # generic in the type stubs only
    ExecuteCall = grpc.aio.StreamStreamCall[ExecuteRequest, ExecuteReply]

_STATES = MappingProxyType({int(state): state for state in WorkerState})


class PlanStream:
    """One `Execute` call. Written by one task and read by one task; closed by its owner."""

    def __init__(self, call: "ExecuteCall") -> None:
        self._call = call

    async def open(self, term: Term, *, stream_number: int) -> int:
        """Open a stream of the term; the seq of the first plan that the worker has not started.

        Raises:
            EngineError: the worker refused.
        """
        opening = ExecuteOpen(
            epoch=term.epoch, term=term.term, incarnation=term.info.incarnation, stream_number=stream_number
        )
        with _translated():
            await self._write(ExecuteRequest(open=opening))
            reply = await self._call.read()
        if not isinstance(reply, ExecuteReply) or not reply.HasField("opened"):
            raise UnavailableError("the worker did not open the plan stream", field="opened")
        return reply.opened.expected_seq

    async def write(self, plan: EncodedPlan) -> None:
        """Send one plan; waits while the worker does not read."""
        with _translated():
            await self._write(ExecuteRequest(plan=PlanMessage(body=plan.body, crc32=plan.crc32)))

    async def read(self) -> StreamAnswer:
        """The worker's next answer.

        Raises:
            DataFault: a result whose checksum or content is wrong.
            EngineError: why the stream ended.
        """
        with _translated():
            reply = await self._call.read()
        if not isinstance(reply, ExecuteReply):
            raise UnavailableError("the worker ended the plan stream")
        kind = reply.WhichOneof("reply")
        if kind == "result":
            return decode_result(open_message(reply.result.body, reply.result.crc32))
        if kind == "drain":
            return DrainAnnounced(reply.drain.reason)
        if kind == "need_full":
            return FullPlanNeeded(reply.need_full.seq)
        if kind == "gap":
            return PlansMissing(reply.gap.expected_seq, reply.gap.received_seq)
        return LinkNack(kind or "unknown")

    def close(self) -> None:
        """Cancel the call. Safe to repeat."""
        self._call.cancel()

    async def _write(self, request: ExecuteRequest) -> None:
        try:
            await self._call.write(request)
        except asyncio.InvalidStateError:
            # The call has ended. Its reader learns why; a writer cannot.
            return


class WorkerCalls:
    """The calls to one worker over one channel, which it owns."""

    def __init__(self, channel: grpc.aio.Channel, *, certificates: object = None) -> None:
        """Call over `channel`, which was opened with `certificates`."""
        self.certificates = certificates
        self._channel = channel
        self._stub = WorkerServiceStub(channel)

    async def attach(self, worker: str, *, epoch: int, term: int, scheduler_name: str, timeout_s: float) -> Term:
        """Begin a term.

        Raises:
            EngineError: why not; `StaleEpoch` carries the highest pair the worker has seen.
        """
        request = AttachRequest(
            epoch=epoch,
            term=term,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            features=sorted(Feature),
            scheduler_name=scheduler_name,
        )
        with _translated():
            reply = await self._stub.Attach(request, timeout=timeout_s)
        return Term(worker=worker, epoch=epoch, term=term, info=worker_info_from_proto(reply))

    def execute(self) -> PlanStream:
        """Start an `Execute` call."""
        return PlanStream(self._stub.Execute())

    async def reports(self, *, interval_ms: int) -> AsyncIterator[Report]:
        """The worker's reports until it ends them.

        Raises:
            EngineError: why the stream broke.
        """
        call = self._stub.Report(ReportRequest(interval_ms=interval_ms))
        try:
            while True:
                with _translated():
                    report = await call.read()
                if not isinstance(report, WorkerReport):
                    return
                yield _report(report)
        finally:
            call.cancel()

    async def ready(self, *, timeout_s: float) -> bool:
        """Whether the channel could be connected in that time."""
        try:
            await asyncio.wait_for(self._channel.channel_ready(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def close(self, *, grace_s: float | None = None) -> None:
        """Close the channel and every call on it, at once or when `grace_s` is over. Safe to repeat."""
        await self._channel.close(grace_s)


def _report(message: WorkerReport) -> Report:
    return Report(
        incarnation=message.incarnation,
        state=_STATES.get(int(message.state)),
        device_counter=message.device_counter,
        capture_budget_s=message.capture_budget_ms / 1000,
        pair=(message.epoch, message.term),
        started_seq=message.last_started_seq,
        finished_seq=message.last_finished_seq,
        buckets=buckets_from_proto(message.buckets),
    )


@contextmanager
def _translated() -> Iterator[None]:
    """Raises the taxonomy's error for a failed call."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
