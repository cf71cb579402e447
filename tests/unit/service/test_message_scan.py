"""The count of a message's fields is that of its parser's, and malformed bytes are left to the parser."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.forwardplane.v1 import generate_pb2 as pb
from protos.service.message_scan import SCANNED_BYTES, has_too_many_fields
from protos.service.readable import Unreadable, tolerant
from protos.wire.limits import MAX_FIELDS_OF_ONE_MESSAGE, MAX_MESSAGE_FIELDS, MAX_PROMPT_BYTES

TEXT = "x" * 200
CHAT = 100
FIELDS = 2 + 3 * CHAT
"""Of one request with so long a chat: request, chat, and three for each of its messages."""


def chats(count):
    """So many requests of a chat; their fields are `count * FIELDS`."""
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=TEXT)] * CHAT)
    return pb.GenerateOnceRequest(requests=[pb.GenerateRequest(chat=chat)] * count).SerializeToString()


def padded(data):
    """With a long text behind it, so that it is long enough to be walked."""
    text = pb.GenerateRequest(text="x" * SCANNED_BYTES)
    return data + pb.GenerateOnceRequest(requests=[text]).SerializeToString()


@pytest.mark.parametrize(
    ("data", "is_too_much"),
    [
        (padded(b"\x0a\x00" * (MAX_FIELDS_OF_ONE_MESSAGE - 1)), False),
        (padded(b"\x0a\x00" * MAX_FIELDS_OF_ONE_MESSAGE), True),
        (padded(b"\x08\x01" * (MAX_FIELDS_OF_ONE_MESSAGE - 1)), False),
        (padded(b"\x08\x01" * MAX_FIELDS_OF_ONE_MESSAGE), True),
        (padded(b"\x88\x80\x00\x80\x01" * MAX_FIELDS_OF_ONE_MESSAGE), True),
        (b"\x0b" * (SCANNED_BYTES + 1), True),
        (b"\x0a\x00" * 100, False),
        (chats(MAX_MESSAGE_FIELDS // FIELDS), False),
        (chats(MAX_MESSAGE_FIELDS // FIELDS + 1), True),
        (pb.GenerateOnceRequest(requests=[pb.GenerateRequest(text="x" * MAX_PROMPT_BYTES)]).SerializeToString(), False),
        (
            pb.GenerateOnceRequest(
                requests=[pb.GenerateRequest(tokens=pb.TokenPrompt(ids=range(1 << 18)))]
            ).SerializeToString(),
            False,
        ),
    ],
)
def test_too_many_fields_at_any_depth(data, is_too_much):
    assert has_too_many_fields(pb.GenerateOnceRequest, data) is is_too_much


@pytest.mark.parametrize("end", [b"\x0a", b"\x0a\xff", b"\xff" * 11, b"\x0f"])
def test_a_bad_end_hides_no_fields_in_front_of_it(end):
    """The parser has made them all when it comes to the bad end."""
    assert has_too_many_fields(pb.GenerateOnceRequest, chats(MAX_MESSAGE_FIELDS // FIELDS + 1) + end)
    assert not has_too_many_fields(pb.GenerateOnceRequest, chats(MAX_MESSAGE_FIELDS // FIELDS // 2) + end)


@settings(max_examples=60)
@given(st.binary(min_size=1, max_size=40))
def test_any_bytes_are_walked_to_an_end(block):
    data = block * (SCANNED_BYTES // len(block) + 1)
    read = tolerant(pb.GenerateOnceRequest.FromString)
    assert has_too_many_fields(pb.GenerateOnceRequest, data) in (True, False)
    assert isinstance(read(data), pb.GenerateOnceRequest | Unreadable)
