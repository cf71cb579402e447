"""From a caller's message to a stream that the core works on: the gate, the checks, the prompt, the defaults.

Knows nothing of gRPC. Guards: whatever is refused was refused before anything was sent to the core.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from protos.forwardplane.v1.bridge_pb2 import StateUse, SubmitStream
from protos.forwardplane.v1.generate_pb2 import GenerateRequest, ResumedSample
from protos.wire.enums import HiddenMode
from protos.wire.errors import DeadlinePassed, Draining, EngineError, InvalidRequest, Loading
from protos.wire.limits import MAX_PROMPTS_PER_CALL
from scheduler_svc.edge.caller_identity import CallerIdentity
from scheduler_svc.edge.caller_stream import CallerStream, StreamNames
from scheduler_svc.edge.core_link import CoreLink
from scheduler_svc.edge.prompt_encoder import PromptEncoder
from scheduler_svc.edge.resolve_request import resolve_request, silent_ids
from scheduler_svc.edge.resume_tickets import TicketDesk, request_digest
from scheduler_svc.edge.resuming import SampleTerms, sample_terms, set_held
from scheduler_svc.edge.validate_request import check_hidden_states, validate_generate
from scheduler_svc.text.tokenizer import TextTokenizer

MAX_HELD_IDS = 4096
"""Output tokens that may wait for a slow reader: far above what one pause of a good reader needs."""

Checked = tuple[CallerStream, SubmitStream]


class Admission:
    """Made by the edge's composition root."""

    def __init__(
        self,
        link: CoreLink,
        tokenizer: TextTokenizer,
        encoder: PromptEncoder,
        *,
        tickets: TicketDesk,
        max_hidden_mode: HiddenMode = HiddenMode.NULL,
    ) -> None:
        """Join the parts. `max_hidden_mode`: highest that callers may ask for."""
        self._tickets = tickets
        self._link = link
        self._max_hidden_mode = max_hidden_mode
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._is_draining = False

    def drain(self) -> None:
        """Refuse every request from now on."""
        self._is_draining = True

    async def open_samples(
        self, request: GenerateRequest, caller: CallerIdentity, *, deadline: float
    ) -> list[CallerStream]:
        """Running streams, one for each sample of the request.

        Args:
            request: as it came.
            caller: whose it is.
            deadline: on the event loop's clock.

        Raises:
            EngineError: refused.
        """
        checked = await self._check(request, caller, deadline=deadline, max_held_ids=MAX_HELD_IDS)
        self._link.open_all(checked)
        return [stream for stream, _ in checked]

    async def open_streams(
        self,
        requests: Sequence[GenerateRequest],
        caller: CallerIdentity,
        *,
        deadline: float,
        max_held_ids: int | None = None,
        pooled: StateUse.ValueType | None = None,
    ) -> list[CallerStream]:
        """Running streams for all samples of all `requests`, or for none.

        Args:
            requests: as they came.
            caller: whose they are.
            deadline: on the event loop's clock.
            max_held_ids: most ids of one stream that may wait for the reader; None: as many as there are.
            pooled: what an embedding is made of, in place of the hidden states that the requests ask for.

        Raises:
            EngineError: one was refused; its field begins with the request's place.
        """
        if not requests:
            raise InvalidRequest("requests is empty", field="requests")
        if len(requests) > MAX_PROMPTS_PER_CALL:
            message = f"requests has {len(requests)} items; the limit is {MAX_PROMPTS_PER_CALL}"
            raise InvalidRequest(message, field="requests")
        checked: list[Checked] = []
        for index, request in enumerate(requests):
            try:
                if request.resume:
                    raise InvalidRequest("resume is for Generate, which streams", field="resume")
                checked += await self._check(
                    request, caller, deadline=deadline, max_held_ids=max_held_ids, pooled=pooled
                )
            except EngineError as error:
                error.field = f"requests[{index}].{error.field}".rstrip(".")
                raise
        self._link.open_all(checked)
        return [stream for stream, _ in checked]

    async def _check(
        self,
        request: GenerateRequest,
        caller: CallerIdentity,
        *,
        deadline: float,
        max_held_ids: int | None,
        pooled: StateUse.ValueType | None = None,
    ) -> list[Checked]:
        self.check_gate()
        facts = self._link.facts
        validate_generate(request, facts)
        self._encoder.check_length(request, facts)
        if pooled is None:
            check_hidden_states(request, self._max_hidden_mode)
        await self._encoder.check_grammar(request)
        prompt_ids = await self._encoder.prompt_ids(request)
        prompt_text = await self._encoder.prompt_text(request, prompt_ids) if request.echo else None
        left_s = deadline - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise DeadlinePassed("the request's time was over before it was admitted")
        digest = request_digest(request, prompt_ids, card=facts.card, caller=caller)
        terms = sample_terms(request, digest, self._tickets, left_s=left_s)
        ticket = terms[0].ticket
        left_s = min(left_s, self._tickets.seconds_left(ticket))
        submit = resolve_request(
            request, prompt_ids, facts=facts, drawn_seed=ticket.seed, deadline_ms=max(1, int(left_s * 1000))
        )
        if pooled is not None:
            submit.prompt_wants.states = pooled
        submit.isolation_domain = caller.isolation_domain(request.cache_salt)
        submit.request_id = ticket.request_id
        names = StreamNames(
            request_id=submit.request_id,
            stream_id=0,
            caller=caller,
            client_tag=request.client_tag,
            prompt_tokens=len(prompt_ids),
            seed=submit.sampling.seed,
            prompt_text=prompt_text,
        )
        opened = [(self._named(names, own), own.held) for own in terms]
        return [self._sample(request, submit, own, held=held, max_held_ids=max_held_ids) for own, held in opened]

    def _named(self, names: StreamNames, terms: SampleTerms) -> StreamNames:
        """The names of one sample."""
        return replace(
            names,
            stream_id=self._link.new_stream_id(),
            sample_index=terms.ticket.sample_index,
            prompt_text=None if terms.held is not None and terms.held.has_begun else names.prompt_text,
            ticket=terms.sealed,
        )

    def _sample(
        self,
        request: GenerateRequest,
        submit: SubmitStream,
        names: StreamNames,
        *,
        held: ResumedSample | None,
        max_held_ids: int | None,
    ) -> Checked:
        """One sample of a request that was resolved as `submit`."""
        own = SubmitStream()
        own.CopyFrom(submit)
        own.stream_id = names.stream_id
        own.sampling.sample_index = names.sample_index
        if names.sample_index:
            own.ClearField("prompt_wants")  # the prompt is one, and the first sample tells of it
        decoder = self._tokenizer.decoder(
            keep_special=request.keep_special_tokens, silent_ids=silent_ids(request, self._link.facts)
        )
        stream = CallerStream.begin(names, decoder, stop_strings=request.stop.stop_strings, max_held_ids=max_held_ids)
        if held is not None:
            set_held(own, held)
            stream.resume(held.token_ids, num_bytes=held.text_bytes)
        return stream, own

    def check_gate(self) -> None:
        """Whether requests are taken at all now.

        Raises:
            Draining, Loading: they are not.
        """
        if self._is_draining:
            raise Draining("this scheduler is shutting down")
        if not self._link.facts.is_serving:
            raise Loading("no worker is attached yet")
