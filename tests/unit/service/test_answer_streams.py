"""Answers that are streams, written message by message."""

import grpc
import pytest

from protos.service.handlers import answer_stream
from protos.wire.errors import ConnectionLost


class Call:
    """Takes so many messages; then its peer is gone."""

    def __init__(self, most):
        self.written = []
        self._most = most

    async def write(self, message):
        if len(self.written) == self._most:
            raise grpc.aio.InternalError("Failed to execute a batch")
        self.written.append(message)


def numbers(closed):
    async def behaviour(request, context):
        try:
            for number in range(request):
                yield number
        finally:
            closed.append(True)

    return behaviour


@pytest.mark.parametrize("most", [0, 2])
async def test_a_peer_that_went_while_it_was_written_to_is_a_lost_connection(most):
    call, closed = Call(most), []
    with pytest.raises(ConnectionLost):
        await answer_stream(numbers(closed), 5, call)
    assert call.written == list(range(most))
    assert closed == [True]


async def test_everything_is_written_to_a_peer_that_stays():
    call, closed = Call(9), []
    await answer_stream(numbers(closed), 5, call)
    assert call.written == [0, 1, 2, 3, 4]
    assert closed == [True]
