"""The edge's streams and their way to the core: opens, feeds and ends them over the bridge.

Knows nothing of gRPC. Guards: a stream that is over here is over in the core, and is in the table no more; when the
core is gone every stream ends.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from protos.forwardplane.v1.bridge_pb2 import (
    AbortAnswer,
    CancelStream,
    CoreToEdge,
    PauseStream,
    SubmitStream,
)
from protos.forwardplane.v1.sampling_pb2 import Finish, FinishReason
from protos.wire.errors import EngineError, QueueFull, UnavailableError, UnknownRequest
from scheduler_svc.bridge.next_tokens import next_tokens_from_message
from scheduler_svc.edge.call_size import check_call_size
from scheduler_svc.edge.caller_identity import CallerIdentity
from scheduler_svc.edge.caller_quotas import CallerQuotas
from scheduler_svc.edge.caller_stream import CallerStream
from scheduler_svc.edge.core_questions import Asking, CoreQuestions
from scheduler_svc.edge.held_bytes import HeldBytes
from scheduler_svc.edge.model_facts import ModelFacts
from scheduler_svc.edge.slow_readers import DEFAULT_LIMITS, ReaderLimits, SlowReaders

logger = logging.getLogger(__name__)

_RETRY_AFTER_MS = 1000


class CoreConnection(Asking, Protocol):
    """What the link needs of the bridge's client."""

    def submit(self, submit: SubmitStream) -> None:
        """Send a request."""
        ...

    def cancel(self, cancel: CancelStream) -> None:
        """Send a cancellation."""
        ...

    def pause(self, pause: PauseStream) -> None:
        """Say that a reader fell behind or caught up."""
        ...

    def answer_abort(self, answer: AbortAnswer) -> None:
        """Say what became of another edge's order."""
        ...

    async def receive(self) -> CoreToEdge | None:
        """The core's next message; None when it is gone."""
        ...


class CoreLink:
    """Made by the edge's composition root, used on its event loop."""

    def __init__(
        self,
        connection: CoreConnection,
        facts: ModelFacts,
        *,
        max_streams: int,
        reader_limits: ReaderLimits = DEFAULT_LIMITS,
        quotas: CallerQuotas | None = None,
    ) -> None:
        """Begin without streams.

        Args:
            connection: connected before `start`.
            facts: of the served model before the core said anything.
            max_streams: most streams at once.
            reader_limits: when a slow reader's stream is paused, and ended.
            quotas: of the callers; None: a count of its own.
        """
        self._connection = connection
        self._max_streams = max_streams
        self._facts = facts
        self._streams: dict[int, CallerStream] = {}
        self._samples: dict[str, list[CallerStream]] = {}
        self._next_stream_id = itertools.count(1)
        self.questions = CoreQuestions(connection)
        self._facts_changed: Callable[[ModelFacts], None] | None = None
        self._slow_readers = SlowReaders(say=connection.pause, give_up=self._end_with, limits=reader_limits)
        self._is_gone = False
        self._reading: asyncio.Task[None] | None = None
        self.quotas = CallerQuotas(time.monotonic) if quotas is None else quotas
        self.held = HeldBytes()

    @property
    def facts(self) -> ModelFacts:
        """Of the served model, as of the core's last word."""
        return self._facts

    @property
    def num_streams(self) -> int:
        """Streams that are not over."""
        return len(self._streams)

    def on_facts(self, listener: Callable[[ModelFacts], None]) -> None:
        """Tell `listener` whenever the facts change."""
        self._facts_changed = listener

    def start(self, *, on_gone: Callable[[], None]) -> None:
        """Take the core's messages from now on; `on_gone` is called when there are no more."""
        self._reading = asyncio.create_task(self._read(), name="core link")

        def ended(reading: asyncio.Task[None]) -> None:
            if reading.cancelled():
                return
            error = reading.exception()
            logger.error("the core is gone", extra={"error": str(error) if error is not None else None})
            on_gone()

        self._reading.add_done_callback(ended)

    async def stop(self) -> None:
        """End every stream and take no more messages. Safe to repeat."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})

    def new_stream_id(self) -> int:
        """An id that no stream of this edge had."""
        return next(self._next_stream_id)

    def open(self, stream: CallerStream, submit: SubmitStream) -> None:
        """Send the request; its updates go to `stream`.

        Raises:
            QuotaExceeded: its caller has had its quota, or holds too much.
            QueueFull: this edge serves as many streams as it may, or the core does not keep up.
            UnavailableError: the core is gone.
        """
        if self._is_gone:
            raise UnavailableError("the scheduler core is gone")
        if len(self._streams) >= self._max_streams:
            message = f"this edge serves {len(self._streams)} streams, which is its limit"
            raise QueueFull(message, retry_after_ms=_RETRY_AFTER_MS)
        names = stream.names
        with contextlib.ExitStack() as undo:
            self.held.take(names.stream_id, names.caller, submit.ByteSize())
            undo.callback(self.held.give_back, names.stream_id)
            self.quotas.open_stream(names.caller, prompt_tokens=0 if names.sample_index else names.prompt_tokens)
            undo.callback(self.quotas.close_stream, names.caller, output_tokens=0)
            self._connection.submit(submit)
            undo.pop_all()
        stream.taken_listener = self._slow_readers.look
        self._streams[stream.names.stream_id] = stream
        self._samples.setdefault(stream.names.request_id, []).append(stream)

    def open_all(self, checked: Sequence[tuple[CallerStream, SubmitStream]]) -> None:
        """Open all of them, or none.

        Raises:
            NeverFits: so many streams of one call are never taken.
            EngineError: as `open`.
        """
        check_call_size(checked, self._facts, max_streams=self._max_streams)
        opened: list[CallerStream] = []
        try:
            for stream, submit in checked:
                self.open(stream, submit)
                opened.append(stream)
        finally:
            if len(opened) < len(checked):
                for stream in opened:
                    self.end(stream, FinishReason.FINISH_REASON_ABORT)

    def end(self, stream: CallerStream, reason: FinishReason.ValueType) -> None:
        """End it here and in the core. Does nothing to a stream that is over."""
        if stream.names.stream_id in self._streams:
            stream.end(Finish(reason=reason))
            self._forget(stream)
            self._cancel(stream, reason)

    def cut_off(self, error: EngineError) -> None:
        """End every stream with that status, here and in the core."""
        for stream in list(self._streams.values()):
            self._end_with(stream, error)

    async def abort(self, request_id: str, caller: CallerIdentity) -> None:
        """End the running request of that id, all its samples, whichever edge has it.

        Raises:
            UnknownRequest: `caller` has no such request.
            UnavailableError: the core or the edge that has it does not answer.
        """
        if request_id not in self._samples:
            was_found = await self.questions.abort_elsewhere(request_id, caller)
        else:
            was_found = self._abort_here(request_id, caller)
        if not was_found:
            raise UnknownRequest("no running request of this caller has that request_id", field="request_id")

    def _abort_here(self, request_id: str, caller: CallerIdentity) -> bool:
        streams = self._samples.get(request_id)
        if streams is None or streams[0].names.caller != caller:
            return False
        for stream in list(streams):
            self.end(stream, FinishReason.FINISH_REASON_ABORT)
        return True

    async def _read(self) -> None:
        try:
            while (message := await self._connection.receive()) is not None:
                self._dispatch(message)
        finally:
            self._lost()

    def _dispatch(self, message: CoreToEdge) -> None:
        if message.HasField("next_tokens"):
            for stream_id, position, token_id in next_tokens_from_message(message.next_tokens):
                stream = self._streams.get(stream_id)
                if stream is not None:
                    stream.next_token(position, token_id)
                    self._fed(stream, is_core_done=False)
        for update in message.updates:
            stream = self._streams.get(update.stream_id)
            if stream is not None:
                stream.update(update)
                self._fed(stream, is_core_done=update.HasField("finish") or update.HasField("error"))
        if message.HasField("model"):
            self._facts = self._facts.told(message.model)
            if self._facts_changed is not None:
                self._facts_changed(self._facts)
        self.questions.take(message)
        for order in message.aborts:
            found = self._abort_here(order.request_id, CallerIdentity(order.caller))
            self._connection.answer_abort(AbortAnswer(question=order.question, asker=order.asker, found=found))

    def _fed(self, stream: CallerStream, *, is_core_done: bool) -> None:
        if not stream.is_over:
            self._slow_readers.look(stream)
            return
        self._forget(stream)
        if not is_core_done:
            # It ended here (stop string, slow reader), so the core has to be told.
            self._cancel(stream, FinishReason.FINISH_REASON_ABORT if stream.finish is None else stream.finish.reason)

    def _end_with(self, stream: CallerStream, error: EngineError) -> None:
        stream.fail(error)
        self._forget(stream)
        self._cancel(stream, FinishReason.FINISH_REASON_ABORT)

    def _cancel(self, stream: CallerStream, reason: FinishReason.ValueType) -> None:
        self._connection.cancel(CancelStream(stream_id=stream.names.stream_id, reason=reason))

    def _forget(self, stream: CallerStream) -> None:
        self._slow_readers.forget(stream.names.stream_id)
        del self._streams[stream.names.stream_id]
        self.quotas.close_stream(stream.names.caller, output_tokens=stream.usage.output_tokens)
        self.held.give_back(stream.names.stream_id)
        samples = self._samples[stream.names.request_id]
        samples.remove(stream)
        if not samples:
            del self._samples[stream.names.request_id]

    def _lost(self) -> None:
        self._is_gone = True
        error = UnavailableError("the scheduler core is gone")
        for stream in list(self._streams.values()):
            stream.fail(error)
            self._forget(stream)
        self.questions.core_lost(error)
