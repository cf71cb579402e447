"""The count of a message's fields is that of its parser's, and malformed bytes are left to the parser."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.forwardplane.v1 import generate_pb2 as pb
from protos.service.message_scan import SCANNED_BYTES, has_too_many_fields
from protos.service.readable import Unreadable, tolerant
from protos.wire.limits import MAX_MESSAGE_FIELDS, MAX_PROMPT_BYTES


def chats(count):
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")] * count)
    return pb.GenerateOnceRequest(requests=[pb.GenerateRequest(chat=chat)]).SerializeToString()


@pytest.mark.parametrize(
    ("data", "is_too_much"),
    [
        (b"\x0a\x00" * MAX_MESSAGE_FIELDS, False),
        (b"\x0a\x00" * (MAX_MESSAGE_FIELDS + 1), True),
        (b"\x08\x01" * (MAX_MESSAGE_FIELDS + 1), True),
        (b"\x0b" * (SCANNED_BYTES + 1), True),
        (b"\x0a\x00" * 100, False),
        (chats((MAX_MESSAGE_FIELDS - 2) // 3), False),
        (chats(MAX_MESSAGE_FIELDS // 3 + 1), True),
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
    assert has_too_many_fields(pb.GenerateOnceRequest, chats(MAX_MESSAGE_FIELDS) + end)
    assert not has_too_many_fields(pb.GenerateOnceRequest, chats(MAX_MESSAGE_FIELDS // 4) + end)


@settings(max_examples=60)
@given(st.binary(min_size=1, max_size=40))
def test_any_bytes_are_walked_to_an_end(block):
    data = block * (SCANNED_BYTES // len(block) + 1)
    read = tolerant(pb.GenerateOnceRequest.FromString)
    assert has_too_many_fields(pb.GenerateOnceRequest, data) in (True, False)
    assert isinstance(read(data), pb.GenerateOnceRequest | Unreadable)
