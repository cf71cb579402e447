"""One generation between the core and a caller: takes the core's updates, gives chunks when the caller may have them.

Knows nothing of sockets and calls. Guards: ids, text and positions of its chunks are gapless; it has one end, the
first that happens; what waits for a slow reader is bounded.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from protos.forwardplane.v1.bridge_pb2 import StreamUpdate
from protos.forwardplane.v1.generate_pb2 import GenerateChunk
from protos.forwardplane.v1.sampling_pb2 import Finish, FinishReason, TokenLogprob, Usage
from protos.wire.errors import CapacityError, DeadlinePassed, EngineError, InternalFault, InvalidRequest, RequestAborted
from scheduler_svc.bridge.convert import error_from_message
from scheduler_svc.edge.caller_identity import CallerIdentity
from scheduler_svc.edge.core_refusals import told_to_caller
from scheduler_svc.edge.prompt_parts import PromptPart, prompt_parts
from scheduler_svc.text.detokenizer import IncrementalDecoder
from scheduler_svc.text.stream_text import StreamText


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamNames:
    """Who a stream is and what it began with. Made at admission."""

    request_id: str
    stream_id: int
    caller: CallerIdentity
    client_tag: str
    prompt_tokens: int
    seed: int
    sample_index: int = 0
    prompt_text: str | None = None
    """Given back with the first chunk; None when not asked for."""
    first_prompt_id: int | None = None
    """The token of the prompt that has no log-probability."""
    ticket: bytes = b""
    """With which the caller goes on elsewhere; empty: it cannot."""
    place: str = ""
    """Of the request in its call, before the names of its fields."""
    grammar: str | None = None
    """The field that holds its grammar."""


class Taken(NamedTuple):
    """Output that a caller has from elsewhere."""

    ids: Sequence[int]
    num_bytes: int
    """Of their text."""


NOTHING_TAKEN = Taken((), 0)


class CallerStream:
    """Made at admission, fed by `CoreLink`, emptied by one handler, all on one event loop."""

    def __init__(self, names: StreamNames, text: StreamText[TokenLogprob], *, max_held_ids: int | None = None) -> None:
        """Begin without output.

        Args:
            names: of this stream.
            text: its text side.
            max_held_ids: most ids that may wait for the reader; None: as many as there are.
        """
        self.names = names
        self._text = text
        self._max_held_ids = max_held_ids
        self._prompt: list[PromptPart] = []
        self._cached_tokens = 0
        self._finish: Finish | None = None
        self._error: EngineError | None = None
        self._is_first = True
        self._is_last_given = False
        self._not_before = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.taken_listener: Callable[[CallerStream], None] | None = None
        """Told whenever the reader has taken a chunk of a stream that runs."""

    @classmethod
    def begin(
        cls,
        names: StreamNames,
        decoder: IncrementalDecoder,
        *,
        stop_strings: Sequence[str],
        max_held_ids: int | None,
        taken: Taken = NOTHING_TAKEN,
    ) -> "CallerStream":
        """A stream whose text comes from `decoder` and ends at one of `stop_strings`; it begins behind `taken`.

        Raises:
            InvalidRequest: no stream ever gave just that.
        """
        text = StreamText[TokenLogprob](decoder, stop_strings=stop_strings)
        if not text.resume(taken.ids, num_bytes=taken.num_bytes):
            message = f"resume: no stream gave {taken.num_bytes} bytes of text with {len(taken.ids)} ids and went on"
            raise InvalidRequest(message, field="resume.text_bytes")
        return cls(names, text, max_held_ids=max_held_ids)

    @property
    def is_over(self) -> bool:
        """It has its end; nothing that the core says matters any more."""
        return self._finish is not None or self._error is not None

    @property
    def finish(self) -> Finish | None:
        """Why it ended; None while it runs, and when it failed."""
        return self._finish

    @property
    def error(self) -> EngineError | None:
        """The status that its call ends with, after all chunks; None for a good end."""
        return self._error

    @property
    def usage(self) -> Usage:
        """Token counts so far. The prompt counts for sample 0 only, so that usages of one request add up."""
        is_first_sample = self.names.sample_index == 0
        return Usage(
            prompt_tokens=self.names.prompt_tokens if is_first_sample else 0,
            cached_tokens=self._cached_tokens if is_first_sample else 0,
            output_tokens=self._text.next_pos,
        )

    @property
    def ids_for_reader(self) -> int:
        """Ids that wait for the reader; 0 for one that takes everything at the end."""
        return 0 if self._max_held_ids is None else self._text.held_ids

    def update(self, update: StreamUpdate) -> None:
        """Take what the core says. A stop string ends the stream here, before a finish that the core decided later."""
        if self.is_over:
            return
        if update.HasField("usage"):
            self._cached_tokens = update.usage.cached_tokens
        if update.HasField("prompt"):
            has_text = self.names.prompt_text is not None
            self._prompt = prompt_parts(update.prompt, begins_alone=has_text)
        if update.token_ids:
            self._push(update.first_pos, np.frombuffer(update.token_ids, "<i4").tolist(), update.logprobs)
        if update.HasField("error"):
            error = error_from_message(update.error)
            self.fail(told_to_caller(error, place=self.names.place, grammar=self.names.grammar))
        elif update.HasField("finish"):
            self.end(update.finish)
        self._wake()

    def next_token(self, position: int, token_id: int) -> None:
        """Take one more token, which is all that the core says."""
        if not self.is_over:
            self._push(position, (token_id,))
            self._wake()

    def end(self, finish: Finish) -> None:
        """End it, unless it has ended. Ends that are not the model's also get a status."""
        if self.is_over:
            return
        self._text.finish()
        stop = self._text.stop
        if stop is not None:
            finish = Finish(reason=FinishReason.FINISH_REASON_STOP, stop_string=stop.stop_string)
        self._finish = finish
        self._error = _status_of(finish.reason)
        self._wake()

    def fail(self, error: EngineError) -> None:
        """End it with a status only, unless it has ended."""
        if not self.is_over:
            self._error = error
            self._wake()

    def pace(self, not_before: float) -> None:
        """No chunk before that time of the event loop, unless it is the last. Infinity: only the last."""
        self._not_before = not_before

    async def next_chunk(self) -> GenerateChunk | None:
        """The next chunk, when there is one; None when there are no more.

        A chunk holds everything that may leave at that moment. The last one of a stream that finished carries finish,
        usage and seed; a stream that failed ends without one.
        """
        while not self._is_ready():
            await self._changed()
        if self._is_last_given or (self._finish is None and not self._has_release):
            return None
        if len(self._prompt) > 1 and self._not_before < math.inf:
            return self._marked(self._prompt.pop(0).chunk(self.names.sample_index))
        chunk = self._chunk()
        if self._finish is not None:
            self._is_last_given = True
            chunk.finish.CopyFrom(self._finish)
            chunk.usage.CopyFrom(self.usage)
            chunk.seed = self.names.seed
        elif self.taken_listener is not None and not self.is_over:
            self.taken_listener(self)
        return chunk

    def _push(self, first_pos: int, ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        if first_pos != self._text.next_pos:
            message = f"the core sent output position {first_pos}; expected {self._text.next_pos}"
            self.fail(InternalFault(message, field="first_pos"))
            return
        self._text.push(ids, logprobs)
        if self._text.stop is not None:
            self.end(Finish())
        elif self._max_held_ids is not None and self._text.held_ids > self._max_held_ids:
            message = (
                f"the caller reads too slowly: {self._text.held_ids} tokens wait, the limit is {self._max_held_ids}"
            )
            self.fail(CapacityError(message))

    def _chunk(self) -> GenerateChunk:
        released = self._text.take()
        chunk = GenerateChunk(
            sample_index=self.names.sample_index,
            first_pos=released.first_pos,
            token_ids=released.ids,
            text=released.text,
            text_offset=released.text_offset,
            logprobs=released.logprobs,
        )
        first_pos = self._prompt[0].first_pos if self._prompt else 0
        for part in self._prompt:
            chunk.MergeFrom(part.chunk(self.names.sample_index))
        chunk.prompt_first_pos = first_pos
        self._prompt = []
        return self._marked(chunk)

    def _marked(self, chunk: GenerateChunk) -> GenerateChunk:
        """With what only the stream's first chunk carries."""
        if self._is_first:
            self._is_first = False
            chunk.request_id = self.names.request_id
            chunk.client_tag = self.names.client_tag
            if self.names.prompt_text is not None:
                chunk.prompt_text = self.names.prompt_text
        return chunk

    @property
    def _has_release(self) -> bool:
        return self._text.has_release or bool(self._prompt)

    def _is_ready(self) -> bool:
        return self.is_over or (self._has_release and asyncio.get_running_loop().time() >= self._not_before)

    async def _changed(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        self._wake()
        try:
            await self._waiter
        finally:
            self._waiter = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _wake(self) -> None:
        """Wake who waits: now if there is something for it, at the paced time if there will be."""
        if self._waiter is None:
            return
        if self._is_ready():
            self._fire()
        elif self._has_release and self._timer is None and self._not_before < math.inf:
            self._timer = asyncio.get_running_loop().call_at(self._not_before, self._fire)

    def _fire(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _status_of(reason: FinishReason.ValueType) -> EngineError | None:
    if reason == FinishReason.FINISH_REASON_ABORT:
        return RequestAborted("the request was aborted")
    if reason == FinishReason.FINISH_REASON_DEADLINE:
        return DeadlinePassed("the request's time is over")
    if reason == FinishReason.FINISH_REASON_ERROR:
        return InternalFault("the request failed")
    return None
