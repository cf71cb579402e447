"""What each sample of a request begins with: new, or behind what its caller holds from a scheduler that is gone.

Pure but for the names and seeds it draws. Knows nothing of calls or of the core.
"""

import secrets
from dataclasses import dataclass, replace

import numpy as np

from protos.forwardplane.v1.bridge_pb2 import StateUse, SubmitStream
from protos.forwardplane.v1.generate_pb2 import GenerateRequest, ResumedSample
from protos.wire.errors import InvalidRequest, TicketRefused
from scheduler_svc.edge.resolve_request import num_samples
from scheduler_svc.edge.resume_tickets import REQUEST_ID_BYTES, Ticket, TicketDesk


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTerms:
    """Of one sample that is to be opened."""

    ticket: Ticket
    sealed: bytes = b""
    """For the caller; empty where the server gives none."""
    held: ResumedSample | None = None
    """What the caller has already; None: it is new."""


def sample_terms(request: GenerateRequest, digest: bytes, desk: TicketDesk, *, left_s: float) -> list[SampleTerms]:
    """One for each sample to be opened, at least one; request id and seed are the same for all.

    Args:
        request: checked.
        digest: of the request.
        desk: seals and opens tickets.
        left_s: the request's time; of one that goes on the tickets say it, too.

    Raises:
        InvalidRequest: two items for one sample.
        TicketRefused: a ticket is not of this request.
        UnsupportedFeature: this server resumes nothing.
    """
    if request.resume:
        return _resumed(request, digest, desk)
    first = Ticket(
        request_id=secrets.token_hex(REQUEST_ID_BYTES),
        seed=request.sampling.seed if request.sampling.HasField("seed") else secrets.randbits(64),
        sample_index=0,
        expires_at=desk.expiry(left_s),
    )
    tickets = [replace(first, sample_index=index) for index in range(num_samples(request))]
    return [SampleTerms(ticket=ticket, sealed=desk.seal(ticket, digest)) for ticket in tickets]


def _resumed(request: GenerateRequest, digest: bytes, desk: TicketDesk) -> list[SampleTerms]:
    terms = [
        SampleTerms(ticket=desk.open(item.ticket, digest), sealed=item.ticket, held=item) for item in request.resume
    ]
    first = terms[0].ticket
    if any((own.ticket.request_id, own.ticket.seed) != (first.request_id, first.seed) for own in terms):
        raise TicketRefused("the tickets are of two requests", field="resume")
    if len({own.ticket.sample_index for own in terms}) < len(terms):
        raise InvalidRequest("resume names a sample twice", field="resume")
    return terms


def set_held(submit: SubmitStream, held: ResumedSample) -> None:
    """Let the core go on behind what the caller holds, and say nothing again of the prompt.

    Raises:
        InvalidRequest: the caller holds more than there can be.
    """
    if len(held.token_ids) > submit.max_tokens:
        message = f"resume holds {len(held.token_ids)} output tokens; the limit is {submit.max_tokens}"
        raise InvalidRequest(message, field="resume.token_ids")
    submit.output_ids = np.asarray(held.token_ids, "<i4").tobytes()
    if not submit.HasField("prompt_wants"):
        return
    wants = submit.prompt_wants
    num_prompt_ids = len(submit.prompt_ids) // np.dtype("<i4").itemsize
    if wants.HasField("logprobs_from"):
        wants.logprobs_from += held.prompt_logprobs
        if wants.logprobs_from >= num_prompt_ids:
            wants.ClearField("logprobs_from")
    if held.hidden_states:
        wants.states = StateUse.STATE_USE_UNSPECIFIED
    is_answered = not (wants.HasField("logprobs_from") or wants.states)
    if is_answered or held.token_ids:
        submit.ClearField("prompt_wants")
