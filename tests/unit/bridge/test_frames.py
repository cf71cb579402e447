import asyncio
import struct

import pytest

from protos.wire.errors import DataFault, MessageTooLarge
from protos.wire.limits import MAX_BRIDGE_MESSAGE_BYTES
from scheduler_svc.bridge.frames import frame, read_body


def reader_of(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


async def test_frames_come_back_in_order_and_then_the_end():
    reader = reader_of(frame(b"one") + frame(b"") + frame(b"x" * 70_000))
    assert [await read_body(reader) for _ in range(4)] == [b"one", b"", b"x" * 70_000, None]


@pytest.mark.parametrize("cut", [1, 3, 4, 6])
async def test_an_end_inside_a_frame_is_a_fault(cut):
    with pytest.raises(DataFault, match="ended inside"):
        await read_body(reader_of(frame(b"abc")[:cut]))


async def test_an_announced_length_above_the_cap_is_refused_before_it_is_read():
    with pytest.raises(DataFault, match=str(MAX_BRIDGE_MESSAGE_BYTES)):
        await read_body(reader_of(struct.pack("<I", MAX_BRIDGE_MESSAGE_BYTES + 1)))


def test_a_body_above_the_cap_is_not_framed(monkeypatch):
    monkeypatch.setattr("scheduler_svc.bridge.frames.MAX_BRIDGE_MESSAGE_BYTES", 8)
    assert len(frame(b"x" * 8)) == 12
    with pytest.raises(MessageTooLarge, match="9 bytes"):
        frame(b"x" * 9)
