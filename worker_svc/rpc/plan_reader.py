"""Reads one plan stream and hands each message to the protocol's shell.

Guards: whatever a caller sends, at worst its own stream ends; a caller is read no faster than it reads its answers.
"""

from collections.abc import AsyncIterator

from protos.forwardplane.v1.worker_pb2 import ExecuteRequest
from protos.service.status import fault_border
from protos.wire.errors import DataFault, EngineError
from worker_svc.protocol.messages import StreamOpening
from worker_svc.rpc.plan_intake import PlanIntake
from worker_svc.rpc.plan_stream import PlanStream
from worker_svc.rpc.protocol_loop import ProtocolLoop


async def read_plans(
    requests: AsyncIterator[ExecuteRequest], stream: PlanStream, *, loop: ProtocolLoop, intake: PlanIntake
) -> None:
    """Hand over what the caller sends until it sends nothing more, or something that ends the stream."""
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
