"""The time that streams run: however their call ends, they end with it, and are recorded.

Knows nothing of what is written to whom.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from protos.forwardplane.v1.sampling_pb2 import FinishReason
from scheduler_svc.edge.call_traces import CallTrace
from scheduler_svc.edge.caller_stream import CallerStream
from scheduler_svc.edge.core_link import CoreLink
from scheduler_svc.edge.metrics import EdgeMetrics
from scheduler_svc.edge.stream_record import StreamRecord

# The core ends a late request; the edge's own clock does it when the core does not answer.
_DEADLINE_GRACE_S = 2.0


@contextmanager
def running(
    streams: Sequence[CallerStream],
    *,
    link: CoreLink,
    metrics: EdgeMetrics,
    arrived: float,
    deadline: float,
    trace: CallTrace,
) -> Iterator[list[StreamRecord]]:
    """One record for each of `streams`, which end with the block, or soon after their deadline.

    Args:
        streams: open.
        link: that opened them.
        metrics: get their times.
        arrived: when the call came, on the event loop's clock.
        deadline: when it should be over, on the same clock.
        trace: of the call.
    """
    loop = asyncio.get_running_loop()

    def end(reason: FinishReason.ValueType) -> None:
        for stream in streams:
            link.end(stream, reason)

    records = [StreamRecord(stream, metrics, arrived=arrived) for stream in streams]
    clock = loop.call_at(deadline + _DEADLINE_GRACE_S, end, FinishReason.FINISH_REASON_DEADLINE)
    try:
        yield records
    finally:
        clock.cancel()
        end(FinishReason.FINISH_REASON_ABORT)
        for record in records:
            record.close(loop.time())
        trace.over(streams)
