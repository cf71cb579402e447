import pytest

from protos.forwardplane.v1.bridge_pb2 import CoreToEdge, NextTokens
from protos.wire.errors import DataFault
from scheduler_svc.bridge.next_tokens import next_tokens_from_message, next_tokens_to_message
from scheduler_svc.bridge.outbox import Outbox
from scheduler_svc.core.events import StreamKey, TokenLogprob, TokensReleased

HIGHEST = (2**64 - 1, 2**32 - 1, 2**31 - 1)


def test_next_tokens_come_back_as_they_were_in_their_order():
    tokens = [HIGHEST, (1, 0, 0), (1, 1, 5)]
    message = NextTokens.FromString(next_tokens_to_message(tokens).SerializeToString())
    assert list(next_tokens_from_message(message)) == tokens


def test_no_next_tokens_are_none():
    assert list(next_tokens_from_message(CoreToEdge().next_tokens)) == []


@pytest.mark.parametrize("column", ["stream_ids", "positions", "token_ids"])
@pytest.mark.parametrize("extra", [1, 4, 8])
def test_columns_of_different_lengths_are_a_fault(column, extra):
    message = next_tokens_to_message([(1, 2, 3), (4, 5, 6)])
    setattr(message, column, getattr(message, column) + bytes(extra))
    with pytest.raises(DataFault):
        next_tokens_from_message(message)


def released(first_pos, *ids, **more):
    return TokensReleased(StreamKey(1, 7), first_pos, ids, **more)


@pytest.mark.parametrize(
    "first",
    [released(0, 5, cached_tokens=3), released(0, 5, logprobs=(TokenLogprob(logprob=-1.0),)), released(0, 5, 6)],
)
def test_a_token_with_more_to_say_and_all_behind_it_go_as_an_update(first):
    outbox = Outbox()
    outbox.add(first)
    outbox.add(released(len(first.token_ids), 9))
    (message,) = outbox.take().values()
    (update,) = message.updates
    assert not message.HasField("next_tokens")
    assert len(update.token_ids) == 4 * (len(first.token_ids) + 1)
    outbox.add(released(3, 8))
    (message,) = outbox.take().values()
    assert list(next_tokens_from_message(message.next_tokens)) == [(7, 3, 8)]
    assert not message.updates
