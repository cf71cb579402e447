"""Readers who fall behind: the core is told to pause their streams, and those who stay behind are ended.

Guards: what waits for a reader stays small without ending readers who catch up; a paused stream has an end in time.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protos.forwardplane.v1.bridge_pb2 import PauseStream
from protos.wire.errors import CapacityError
from scheduler_svc.edge.caller_stream import CallerStream

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderLimits:
    """When a reader is behind, and for how long it may be."""

    pause_ids: int = 512
    """Output tokens that wait for it."""
    resume_ids: int = 64
    """It has caught up."""
    paused_s: float = 30.0
    """Longest time behind."""


DEFAULT_LIMITS = ReaderLimits()


class SlowReaders:
    """Made by `CoreLink`, used on its event loop."""

    def __init__(
        self,
        *,
        say: Callable[[PauseStream], None],
        give_up: Callable[[CallerStream, CapacityError], None],
        limits: ReaderLimits = DEFAULT_LIMITS,
    ) -> None:
        """Begin without paused streams.

        Args:
            say: tells the core.
            give_up: ends a stream with an error, here and in the core.
            limits: when.
        """
        self._say = say
        self._give_up = give_up
        self._limits = limits
        self._paused: dict[int, asyncio.TimerHandle] = {}

    def look(self, stream: CallerStream) -> None:
        """What waits for the reader of a running stream has changed."""
        stream_id, waiting = stream.names.stream_id, stream.ids_for_reader
        if stream_id not in self._paused:
            if waiting >= self._limits.pause_ids:
                timer = asyncio.get_running_loop().call_later(self._limits.paused_s, self._too_long, stream)
                self._paused[stream_id] = timer
                self._say(PauseStream(stream_id=stream_id, paused=True))
        elif waiting <= self._limits.resume_ids:
            self.forget(stream_id)
            self._say(PauseStream(stream_id=stream_id, paused=False))

    def forget(self, stream_id: int) -> None:
        """The stream is over, or its reader is not behind any more."""
        timer = self._paused.pop(stream_id, None)
        if timer is not None:
            timer.cancel()

    def _too_long(self, stream: CallerStream) -> None:
        note_slow([stream])
        message = (
            f"the caller reads too slowly: {stream.ids_for_reader} tokens have waited for {self._limits.paused_s:g} s"
        )
        self._give_up(stream, CapacityError(message))


def note_slow(streams: Sequence[CallerStream]) -> None:
    """Log that the caller of these streams, which are of one call, is given up."""
    _logger.warning(
        "a caller reads too slowly",
        extra={
            "request_id": streams[0].names.request_id,
            "output_tokens": sum(stream.usage.output_tokens for stream in streams),
            "tokens_waiting": sum(stream.ids_for_reader for stream in streams),
        },
    )
