"""From a caller's message to a stream that the core works on: the gate, the checks, the prompt, the defaults.

Knows nothing of gRPC. Guards: whatever is refused was refused before anything was sent to the core.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from protos.forwardplane.v1.bridge_pb2 import StateUse, SubmitStream
from protos.forwardplane.v1.generate_pb2 import GenerateRequest, ResumedSample
from protos.wire.enums import HiddenMode
from protos.wire.errors import DeadlinePassed, Draining, EngineError, InvalidRequest, Loading
from scheduler_svc.edge.caller_identity import CallerIdentity
from scheduler_svc.edge.caller_stream import NOTHING_TAKEN, CallerStream, StreamNames, Taken
from scheduler_svc.edge.core_link import CoreLink
from scheduler_svc.edge.prompt_encoder import PromptEncoder
from scheduler_svc.edge.resolve_request import resolve_request, silent_ids
from scheduler_svc.edge.resuming import Asked, ResumeDesk, SampleTerms, set_held
from scheduler_svc.edge.validate_request import check_hidden_states, check_num_requests, validate_generate
from scheduler_svc.text.tokenizer import TextTokenizer

MAX_HELD_IDS = 4096
"""Output tokens that may wait for a slow reader: far above what one pause of a good reader needs."""

Checked = tuple[CallerStream, SubmitStream]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What holds for all requests of one call."""

    caller: CallerIdentity
    deadline: float
    """On the event loop's clock."""
    desk: ResumeDesk
    max_held_ids: int | None
    pooled: StateUse.ValueType | None = None


class Admission:
    """Made by the edge's composition root."""

    def __init__(
        self,
        link: CoreLink,
        tokenizer: TextTokenizer,
        encoder: PromptEncoder,
        *,
        resuming: ResumeDesk,
        max_hidden_mode: HiddenMode = HiddenMode.NULL,
    ) -> None:
        """Join the parts. `max_hidden_mode`: highest that callers may ask for."""
        self._resuming = resuming
        self._no_tickets = ResumeDesk(None)
        """For calls whose answers carry none."""
        self._link = link
        self._max_hidden_mode = max_hidden_mode
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._is_draining = False

    def drain(self) -> None:
        """Refuse every request from now on."""
        self._is_draining = True

    async def open_samples(
        self, request: GenerateRequest, caller: CallerIdentity, *, deadline: float, traceparent: str = ""
    ) -> list[CallerStream]:
        """Running streams, one for each sample of the request.

        Args:
            request: as it came.
            caller: whose it is.
            deadline: on the event loop's clock.
            traceparent: of the call's span.

        Raises:
            EngineError: refused.
        """
        call = _Call(caller=caller, deadline=deadline, desk=self._resuming, max_held_ids=MAX_HELD_IDS)
        checked = await self._check(request, call)
        self._open(checked, traceparent)
        return [stream for stream, _ in checked]

    async def open_streams(
        self,
        requests: Sequence[GenerateRequest],
        caller: CallerIdentity,
        *,
        deadline: float,
        max_held_ids: int | None = None,
        pooled: StateUse.ValueType | None = None,
        traceparent: str = "",
    ) -> list[CallerStream]:
        """Running streams for all samples of all `requests`, or for none.

        Args:
            requests: as they came.
            caller: whose they are.
            deadline: on the event loop's clock.
            max_held_ids: most ids of one stream that may wait for the reader; None: as many as there are.
            pooled: what an embedding is made of, in place of the hidden states that the requests ask for.
            traceparent: of the call's span.

        Raises:
            EngineError: one was refused; its field begins with the request's place.
        """
        check_num_requests(len(requests))
        self._link.quotas.take_requests(caller, len(requests) - 1)
        call = _Call(caller=caller, deadline=deadline, desk=self._no_tickets, max_held_ids=max_held_ids, pooled=pooled)
        checked: list[Checked] = []
        for index, request in enumerate(requests):
            place = f"requests[{index}]."
            try:
                if request.resume:
                    raise InvalidRequest("resume is for Generate, which streams", field="resume")
                checked += await self._check(request, call, place=place)
            except EngineError as error:
                error.place_field(place)
                raise
        self._open(checked, traceparent)
        return [stream for stream, _ in checked]

    def _open(self, checked: Sequence[Checked], traceparent: str) -> None:
        for _, submit in checked:
            submit.traceparent = traceparent
        self._link.open_all(checked)

    async def _check(self, request: GenerateRequest, call: _Call, *, place: str = "") -> list[Checked]:
        self.check_gate()
        facts, caller = self._link.facts, call.caller
        validate_generate(request, facts)
        self._encoder.check_length(request, facts)
        if call.pooled is None:
            check_hidden_states(request, self._max_hidden_mode)
        await self._encoder.check_grammar(request)
        prompt_ids = await self._encoder.prompt_ids(request)
        prompt_text = await self._encoder.prompt_text(request, prompt_ids) if request.echo else None
        left_s = call.deadline - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise DeadlinePassed("the request's time was over before it was admitted")
        asked = Asked(request, prompt_ids, card=facts.card, caller=caller)
        left_s, terms = call.desk.terms(asked, left_s=left_s)
        ticket = terms[0].ticket
        submit = resolve_request(
            request, prompt_ids, facts=facts, seed=ticket.seed, deadline_ms=max(1, int(left_s * 1000))
        )
        if call.pooled is not None:
            submit.prompt_wants.states = call.pooled
        submit.isolation_domain = caller.isolation_domain(request.cache_salt)
        submit.request_id = ticket.request_id
        submit.share_domain = caller.share_domain
        submit.share = caller.share
        names = StreamNames(
            request_id=submit.request_id,
            stream_id=0,
            caller=caller,
            client_tag=request.client_tag,
            prompt_tokens=len(prompt_ids),
            seed=submit.sampling.seed,
            prompt_text=prompt_text,
            first_prompt_id=prompt_ids[0],
            place=place,
            grammar=request.WhichOneof("grammar"),
        )
        opened = [(self._named(names, own), own.held) for own in terms]
        return [self._sample(request, submit, own, held=held, max_held_ids=call.max_held_ids) for own, held in opened]

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
        taken = NOTHING_TAKEN
        if held is not None:
            set_held(own, held)
            taken = Taken(held.token_ids, held.text_bytes)
        stream = CallerStream.begin(
            names, decoder, stop_strings=request.stop.stop_strings, max_held_ids=max_held_ids, taken=taken
        )
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
