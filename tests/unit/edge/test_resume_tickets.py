"""Tickets: what opens them, what does not, and what a request must share with the one that was admitted."""

from pathlib import Path

import pytest

from protos.forwardplane.v1.bridge_pb2 import StateUse, SubmitStream
from protos.forwardplane.v1.generate_pb2 import GenerateRequest, ResumedSample
from protos.forwardplane.v1.sampling_pb2 import SamplingParameters
from protos.wire.errors import InvalidRequest, TicketRefused, UnsupportedFeature
from protos.wire.limits import MAX_TICKET_BYTES
from scheduler_svc.edge.caller_identity import ANONYMOUS, CallerIdentity
from scheduler_svc.edge.resume_tickets import Ticket, TicketDesk, read_keys, request_digest
from scheduler_svc.edge.resuming import Asked, ResumeDesk, SampleTerms, set_held
from tests.support.edge_harness import tiny_card

OLD, NEW = bytes(range(32)), bytes(range(1, 65))
TICKET = Ticket(request_id="00ff" * 8, seed=2**64 - 1, sample_index=15, expires_at=1100)
DIGEST = bytes(32)
CARD = tiny_card(2)


def desk(*keys: bytes, now: float = 1000.0) -> TicketDesk:
    return TicketDesk(keys, unix_clock=lambda: now)


def digest(request: GenerateRequest, **changes: object) -> bytes:
    return request_digest(request, **{"prompt_ids": [1, 2], "card": CARD, "caller": ANONYMOUS, **changes})


def test_a_ticket_says_what_was_sealed_and_any_known_key_opens_it() -> None:
    sealed = desk(OLD).seal(TICKET, DIGEST)
    assert len(sealed) <= MAX_TICKET_BYTES
    assert desk(OLD).open(sealed, DIGEST) == desk(NEW, OLD).open(sealed, DIGEST) == TICKET


def test_s2_every_flipped_bit_is_refused() -> None:
    sealed = desk(OLD).seal(TICKET, DIGEST)
    for place in range(len(sealed)):
        torn = sealed[:place] + bytes([sealed[place] ^ (1 << place % 8)]) + sealed[place + 1 :]
        with pytest.raises(TicketRefused):
            desk(OLD).open(torn, DIGEST)


@pytest.mark.parametrize("torn", [b"", b"\1", bytes(300)])
def test_what_is_no_ticket_is_refused(torn: bytes) -> None:
    with pytest.raises(TicketRefused):
        desk(OLD).open(torn, DIGEST)


def test_s2_an_unknown_key_another_request_and_age_are_refused() -> None:
    sealed = desk(OLD).seal(TICKET, DIGEST)
    for opening, of_request in ((desk(NEW), DIGEST), (desk(OLD), bytes(31) + b"\1"), (desk(OLD, now=1100.5), DIGEST)):
        with pytest.raises(TicketRefused):
            opening.open(sealed, of_request)


def test_the_digest_is_of_all_that_was_asked_by_whom_of_which_model() -> None:
    request = GenerateRequest(text="a", sampling=SamplingParameters(temperature=0.5))
    resumed = GenerateRequest(resume=[ResumedSample(ticket=b"t")])
    resumed.MergeFrom(request)
    assert digest(resumed) == digest(request)
    others = [
        digest(GenerateRequest(text="b", sampling=request.sampling)),
        digest(GenerateRequest(text="a", sampling=SamplingParameters(temperature=0.6))),
        digest(request, prompt_ids=[1, 3]),
        digest(request, caller=CallerIdentity("other")),
        digest(request, card=tiny_card(2, weights_fingerprint="x")),
        digest(request, card=tiny_card(2, tokenizer_fingerprint="x")),
    ]
    assert len({digest(request), *others}) == 1 + len(others)


def terms(request: GenerateRequest, tickets: TicketDesk | None) -> list[SampleTerms]:
    return ResumeDesk(tickets).terms(Asked(request, [1, 2], card=CARD, caller=ANONYMOUS), left_s=60.0)[1]


def test_samples_of_one_request_share_id_and_seed_and_a_server_without_key_gives_no_tickets() -> None:
    request = GenerateRequest(text="a", sampling=SamplingParameters(n=3))
    sealed = terms(request, desk(OLD))
    assert [own.ticket.sample_index for own in sealed] == [0, 1, 2]
    assert len({(own.ticket.request_id, own.ticket.seed) for own in sealed}) == 1
    assert [own.sealed for own in terms(request, None)] == [b"", b"", b""]
    with pytest.raises(UnsupportedFeature, match="no resume key"):
        terms(GenerateRequest(text="a", resume=[ResumedSample(ticket=sealed[0].sealed)]), None)


def test_the_seed_is_the_callers_own_if_it_names_one_and_drawn_if_not() -> None:
    for seed in (0, 2**64 - 1):
        request = GenerateRequest(text="a", sampling=SamplingParameters(n=2, seed=seed))
        assert [own.ticket.seed for tickets in (None, desk(OLD)) for own in terms(request, tickets)] == [seed] * 4
    drawn = [terms(GenerateRequest(text="a"), None)[0].ticket.seed for _ in range(2)]
    assert drawn[0] != drawn[1]


def test_a_sample_twice_and_tickets_of_two_requests_are_refused() -> None:
    request = GenerateRequest(text="a", sampling=SamplingParameters(n=2))
    first, second = terms(request, desk(OLD)), terms(request, desk(OLD))
    for tickets, error in (((first[0], first[0]), InvalidRequest), ((first[0], second[1]), TicketRefused)):
        resumed = GenerateRequest(resume=[ResumedSample(ticket=own.sealed) for own in tickets])
        resumed.MergeFrom(request)
        with pytest.raises(error):
            terms(resumed, desk(OLD))


def test_a_resumed_request_has_the_time_that_its_ticket_says() -> None:
    request = GenerateRequest(text="a")
    (own,) = terms(request, desk(OLD))
    request.resume.append(ResumedSample(ticket=own.sealed))
    asked = Asked(request, [1, 2], card=CARD, caller=ANONYMOUS)
    left_s, (again,) = ResumeDesk(desk(OLD, now=1040.0)).terms(asked, left_s=600.0)
    assert 20 <= left_s <= 21
    assert again.ticket == own.ticket


@pytest.mark.parametrize(
    ("held", "first", "states"),
    [
        (ResumedSample(prompt_logprobs=2), 3, StateUse.STATE_USE_LAST),
        (ResumedSample(prompt_logprobs=2, hidden_states=True), 3, StateUse.STATE_USE_UNSPECIFIED),
        (ResumedSample(prompt_logprobs=4), None, StateUse.STATE_USE_LAST),
        (ResumedSample(prompt_logprobs=4, hidden_states=True), None, None),
        (ResumedSample(token_ids=[7]), None, None),
    ],
)
def test_nothing_of_the_prompt_is_said_again(held: ResumedSample, first: int | None, states: int | None) -> None:
    submit = SubmitStream(prompt_ids=bytes(4 * 5), max_tokens=8)
    submit.prompt_wants.logprobs_from = 1
    submit.prompt_wants.states = StateUse.STATE_USE_LAST
    set_held(submit, held)
    wants = submit.prompt_wants
    assert submit.HasField("prompt_wants") == (states is not None)
    assert (wants.logprobs_from if wants.HasField("logprobs_from") else None) == first
    assert wants.states == (states or 0)


def test_more_output_than_may_be_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        set_held(SubmitStream(max_tokens=2), ResumedSample(token_ids=[1, 2, 3]))
    assert caught.value.field == "resume.token_ids"


@pytest.mark.parametrize(
    ("first", "states", "held", "field"),
    [
        (None, 0, ResumedSample(prompt_logprobs=1), "resume.prompt_logprobs"),
        (3, 0, ResumedSample(prompt_logprobs=3), "resume.prompt_logprobs"),
        (3, 0, ResumedSample(hidden_states=True), "resume.hidden_states"),
        (3, 1, ResumedSample(prompt_logprobs=2, hidden_states=True), None),
        (None, 0, ResumedSample(), None),
    ],
)
def test_more_of_the_prompt_than_was_asked_for_is_refused(
    first: int | None, states: StateUse.ValueType, held: ResumedSample, field: str | None
) -> None:
    submit = SubmitStream(prompt_ids=bytes(4 * 5), max_tokens=8)
    if first is not None:
        submit.prompt_wants.logprobs_from = first
        submit.prompt_wants.states = states
    if field is None:
        set_held(submit, held)
        return
    with pytest.raises(InvalidRequest) as caught:
        set_held(submit, held)
    assert caught.value.field == field


def test_keys_are_read_from_a_file_first_one_first(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# new\n{NEW.hex()}\n\n{OLD.hex()}\n")
    assert read_keys(path) == (NEW, OLD)


@pytest.mark.parametrize("content", [None, "", "# none\n", "xyz\n", OLD.hex()[:-2], "\udcff"])
def test_a_file_without_usable_keys_is_refused_and_not_shown(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidRequest) as caught:
        read_keys(path)
    assert caught.value.field == "resume_key_file"
    assert not content or content.strip("\n") not in caught.value.message
