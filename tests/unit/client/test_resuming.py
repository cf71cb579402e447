"""What a client asks for after its scheduler is gone, and for how long."""

import pytest

from protos.client.resuming import Patience, ResumableStream
from protos.forwardplane.v1.generate_pb2 import GenerateChunk, GenerateRequest
from protos.forwardplane.v1.sampling_pb2 import Finish, FinishReason, SamplingParameters, TokenLogprob
from protos.wire.errors import (
    ConnectionLost,
    DeadlinePassed,
    EngineError,
    InternalFault,
    InvalidRequest,
    Loading,
    NoServer,
    QueueFull,
    TicketRefused,
    UnavailableError,
)

LOST = ConnectionLost("lost")
END = Finish(reason=FinishReason.FINISH_REASON_LENGTH)
FIRST = GenerateChunk(sample_index=1, token_ids=[5, 6], text="é!", resume_tickets=[b"t0", b"t1"])


def two_samples(**options: float | None) -> ResumableStream:
    request = GenerateRequest(text="a", sampling=SamplingParameters(n=2))
    return ResumableStream(request, **{"timeout_s": None, **options})


def test_before_anything_came_the_request_is_asked_again_as_it_was() -> None:
    stream = two_samples()
    first = stream.rest()
    assert stream.pause_s(LOST) is not None
    assert stream.rest() == first
    assert not first.resume


def test_what_has_come_is_named_and_what_ended_is_not_asked_for() -> None:
    stream = two_samples()
    stream.take(FIRST)
    stream.take(GenerateChunk(sample_index=0, prompt_logprobs=[TokenLogprob()] * 3))
    stream.take(GenerateChunk(sample_index=1, first_pos=2, token_ids=[7], text="x"))
    assert stream.pause_s(LOST) is not None
    zero, one = stream.rest().resume
    assert (zero.ticket, zero.token_ids, zero.text_bytes, zero.prompt_logprobs) == (b"t0", [], 0, 3)
    assert (one.ticket, one.token_ids, one.text_bytes, one.has_begun) == (b"t1", [5, 6, 7], 4, True)
    stream.take(GenerateChunk(sample_index=1, first_pos=3, token_ids=[8], finish=END, resume_tickets=[b"n0", b"n1"]))
    (left,) = stream.rest().resume
    assert left.ticket == b"n0"
    stream.take(GenerateChunk(sample_index=0, token_ids=[1], finish=END, resume_tickets=[b"m0"]))
    assert stream.rest() is None


def test_a_server_that_goes_on_elsewhere_is_not_believed() -> None:
    stream = two_samples()
    stream.take(FIRST)
    stream.rest()
    for chunk in (GenerateChunk(sample_index=1, first_pos=1, token_ids=[6]), GenerateChunk(sample_index=2)):
        with pytest.raises(InternalFault):
            stream.take(chunk)


def test_without_tickets_a_stream_that_has_begun_ends() -> None:
    stream = two_samples()
    stream.take(GenerateChunk(token_ids=[5]))
    assert stream.pause_s(LOST) is None
    assert stream.final(LOST) is LOST


def test_no_time_left_is_said() -> None:
    with pytest.raises(DeadlinePassed):
        two_samples(timeout_s=-1.0).timeout_s()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    "error", [NoServer("x"), Loading("x"), InvalidRequest("x"), QueueFull("x"), InternalFault("x"), DeadlinePassed("x")]
)
def test_a_refusal_at_the_door_is_told_at_once(error: EngineError) -> None:
    assert Patience(30.0).pause_s(error) is None


@pytest.mark.parametrize("error", [LOST, NoServer("x"), Loading("x"), QueueFull("x"), UnavailableError("x")])
def test_after_a_loss_it_is_asked_again_until_the_limit(error: EngineError) -> None:
    clock = Clock()
    patience = Patience(5.0, clock=clock)
    assert patience.pause_s(LOST) is not None
    asked = 0
    while (pause_s := patience.pause_s(error)) is not None:
        assert 0 < pause_s <= 0.6
        clock.now += pause_s
        asked += 1
    assert 5.0 <= clock.now < 5.1
    assert 10 <= asked <= 30
    assert patience.final(error) is error


def test_a_server_that_cannot_resume_is_not_what_went_wrong() -> None:
    patience = Patience(5.0)
    patience.heard()
    assert patience.pause_s(LOST) is not None
    refused = TicketRefused("x")
    assert patience.pause_s(refused) is None
    assert patience.final(refused) is LOST


def test_each_loss_has_its_own_time_and_none_is_no_resume() -> None:
    clock = Clock()
    patience = Patience(5.0, clock=clock)
    for _ in range(3):
        patience.heard()
        assert patience.pause_s(LOST) is not None
        clock.now += 4.0
    assert Patience(0.0).pause_s(LOST) is None


def test_a_server_says_when_to_come_again() -> None:
    patience = Patience(30.0)
    patience.heard()
    patience.pause_s(LOST)
    assert patience.pause_s(QueueFull("x", retry_after_ms=2500)) == 2.5
