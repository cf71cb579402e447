"""What each sample of a request begins with: new, or behind what its caller holds from a scheduler that is gone.

Pure but for the names and seeds it draws. Knows nothing of calls or of the core.
"""

import secrets
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np

from protos.forwardplane.v1.bridge_pb2 import StateUse, SubmitStream
from protos.forwardplane.v1.generate_pb2 import GenerateRequest, ResumedSample
from protos.service.model_files import ModelCard
from protos.wire.errors import InvalidRequest, TicketRefused, UnsupportedFeature
from scheduler_svc.edge.caller_identity import CallerIdentity
from scheduler_svc.edge.resolve_request import num_samples
from scheduler_svc.edge.resume_tickets import REQUEST_ID_BYTES, Ticket, TicketDesk, request_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTerms:
    """Of one sample that is to be opened."""

    ticket: Ticket
    sealed: bytes = b""
    """For the caller; empty where the server gives none."""
    held: ResumedSample | None = None
    """What the caller has already; None: it is new."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A checked request, of whom, and who asks."""

    request: GenerateRequest
    prompt_ids: Sequence[int]
    _: KW_ONLY
    card: ModelCard
    caller: CallerIdentity

    def digest(self) -> bytes:
        """What must be the same for its streams to go on elsewhere."""
        return request_digest(self.request, self.prompt_ids, card=self.card, caller=self.caller)


class ResumeDesk:
    """Says what samples begin with. Made by the edge's composition root."""

    def __init__(self, tickets: TicketDesk | None) -> None:
        """Give and take tickets at `tickets`; None: this server resumes nothing."""
        self._tickets = tickets

    def terms(self, asked: Asked, *, left_s: float) -> tuple[float, list[SampleTerms]]:
        """The request's time and one item for each sample to be opened, at least one; all of one request id and seed.

        Args:
            asked: the request.
            left_s: the time it came with; tickets of one that goes on may say less.

        Raises:
            InvalidRequest: two items for one sample.
            TicketRefused: a ticket is not of this request.
            UnsupportedFeature: this server resumes nothing.
        """
        request, tickets = asked.request, self._tickets
        if request.resume:
            if tickets is None:
                raise UnsupportedFeature("this server does not resume streams: it has no resume key", field="resume")
            terms = _resumed(request, asked.digest(), tickets)
            return min(left_s, tickets.seconds_left(terms[0].ticket)), terms
        first = Ticket(
            request_id=secrets.token_hex(REQUEST_ID_BYTES),
            seed=request.sampling.seed if request.sampling.HasField("seed") else secrets.randbits(64),
            sample_index=0,
            expires_at=0 if tickets is None else tickets.expiry(left_s),
        )
        samples = [replace(first, sample_index=index) for index in range(num_samples(request))]
        if tickets is None:
            return left_s, [SampleTerms(ticket=ticket) for ticket in samples]
        digest = asked.digest()
        return left_s, [SampleTerms(ticket=ticket, sealed=tickets.seal(ticket, digest)) for ticket in samples]


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
    _check_held_of_prompt(submit, held)
    if not submit.HasField("prompt_wants"):
        return
    wants = submit.prompt_wants
    if wants.HasField("logprobs_from"):
        wants.logprobs_from += held.prompt_logprobs
        if wants.logprobs_from >= _num_prompt_ids(submit):
            wants.ClearField("logprobs_from")
    if held.hidden_states:
        wants.states = StateUse.STATE_USE_UNSPECIFIED
    is_answered = not (wants.HasField("logprobs_from") or wants.states)
    if is_answered or held.token_ids:
        submit.ClearField("prompt_wants")


def _check_held_of_prompt(submit: SubmitStream, held: ResumedSample) -> None:
    wants = submit.prompt_wants
    most = max(_num_prompt_ids(submit) - wants.logprobs_from, 0) if wants.HasField("logprobs_from") else 0
    if held.prompt_logprobs > most:
        message = f"resume holds {held.prompt_logprobs} log-probabilities of the prompt; the limit is {most}"
        raise InvalidRequest(message, field="resume.prompt_logprobs")
    if held.hidden_states and not wants.states:
        message = "resume holds hidden states; the sample has none"
        raise InvalidRequest(message, field="resume.hidden_states")


def _num_prompt_ids(submit: SubmitStream) -> int:
    return len(submit.prompt_ids) // np.dtype("<i4").itemsize
