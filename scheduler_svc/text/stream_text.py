"""Output ids of one stream to what its caller may have: whole tokens with their text.

Joins detokenizer and stop strings; knows nothing of calls or of the core. Guards: what was taken is `decode(ids)` of
the taken ids, cut at a stop match; no text that may still become part of a stop string is taken.
"""

from collections import deque
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from scheduler_svc.text.detokenizer import IncrementalDecoder
from scheduler_svc.text.stop_strings import StopMatcher

LogprobT = TypeVar("LogprobT")


class StopFound(NamedTuple):
    """Where a stop string ended the output."""

    stop_string: str
    position: int
    """Of the token, within the output, in which the match completes. It counts, later ones do not."""


class Released(NamedTuple, Generic[LogprobT]):
    """What a caller gets next."""

    first_pos: int
    ids: list[int]
    text: str
    text_offset: int
    """Of `text` within the whole output, in UTF-8 bytes."""
    logprobs: list[LogprobT]


class StreamText(Generic[LogprobT]):
    """The text side of one stream. Made per request by the edge, fed and emptied on its event loop."""

    def __init__(self, decoder: IncrementalDecoder, *, stop_strings: Sequence[str] = ()) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(stop_strings)
        self._ids: list[int] = []
        self._logprobs: list[LogprobT] = []
        self._first_pos = 0
        self._text = ""
        self._text_chars_taken = 0
        self._text_bytes_taken = 0
        # Places where the text may be cut: (ids, characters) from the beginning of the output.
        self._borders: deque[tuple[int, int]] = deque()
        self._stop: StopFound | None = None
        self._is_finished = False

    def resume(self, ids: Sequence[int], *, num_bytes: int) -> bool:
        """Begin behind ids that were taken elsewhere, with text of that size. Before anything else; False: impossible.

        What was taken ended at a border, so an unfinished character of theirs was taken as broken.
        """
        is_open = False
        for token_id in ids:
            decoded = self._decoder.push(token_id)
            self._append(decoded.settled, position=0)
            self._append(decoded.text, position=0)
            is_open = decoded.is_open
        if is_open:
            self._append(self._decoder.finish(), position=0)
        if self._stop is not None:
            return False
        self._first_pos = len(ids)
        self._text_chars_taken, self._text_bytes_taken = len(self._text), len(self._text.encode())
        self._text = ""
        return self._text_bytes_taken == num_bytes

    @property
    def next_pos(self) -> int:
        """Position of the next id to be pushed; the number of output ids so far."""
        return self._first_pos + len(self._ids)

    @property
    def held_ids(self) -> int:
        """Ids that were pushed and not taken."""
        return len(self._ids)

    @property
    def stop(self) -> StopFound | None:
        """The stop match that ended the output, once there is one."""
        return self._stop

    @property
    def has_release(self) -> bool:
        """Whether `take` would give at least one id."""
        if self._is_finished:
            return bool(self._ids)
        return bool(self._borders) and self._borders[0][1] <= self._num_chars - self._matcher.hold

    def push(self, ids: Sequence[int], logprobs: Sequence[LogprobT] = ()) -> None:
        """Take output ids in order. Those behind a stop match are dropped."""
        for index, token_id in enumerate(ids):
            if self._stop is not None:
                return
            self._push(token_id)
            if logprobs and len(self._logprobs) < len(self._ids):
                self._logprobs.append(logprobs[index])

    def finish(self) -> None:
        """There are no more ids: everything held may be taken, broken characters as U+FFFD."""
        if not self._is_finished:
            self._append(self._decoder.finish(), position=self.next_pos - 1)
            self._is_finished = True

    def take(self) -> Released[LogprobT]:
        """What may leave now; it is no longer held. Empty if nothing may."""
        num_ids, num_chars = self._cut()
        text = self._text[:num_chars]
        released = Released(
            self._first_pos, self._ids[:num_ids], text, self._text_bytes_taken, self._logprobs[:num_ids]
        )
        del self._ids[:num_ids], self._logprobs[:num_ids]
        self._text = self._text[num_chars:]
        self._text_chars_taken += num_chars
        self._text_bytes_taken += len(text.encode())
        self._first_pos += num_ids
        return released

    @property
    def _num_chars(self) -> int:
        return self._text_chars_taken + len(self._text)

    def _push(self, token_id: int) -> None:
        decoded = self._decoder.push(token_id)
        if decoded.settled:
            self._append(decoded.settled, position=self.next_pos - 1)
            if self._stop is not None:
                return
            self._borders.append((self.next_pos, self._num_chars))
        self._ids.append(token_id)
        self._append(decoded.text, position=self.next_pos - 1)
        if not decoded.is_open and self._stop is None:
            self._borders.append((self.next_pos, self._num_chars))

    def _append(self, text: str, *, position: int) -> None:
        match = self._matcher.feed(text)
        if match is None:
            self._text += text
            return
        text = self._text + text[: match.end]
        # Of what was taken elsewhere nothing can be cut off.
        self._text = text[: max(len(text) - len(match.stop_string), 0)]
        self._stop = StopFound(match.stop_string, position)
        self._is_finished = True

    def _cut(self) -> tuple[int, int]:
        """How many held ids and characters may leave."""
        if self._is_finished:
            self._borders.clear()
            return len(self._ids), len(self._text)
        limit = self._num_chars - self._matcher.hold
        cut = (self._first_pos, self._text_chars_taken)
        while self._borders and self._borders[0][1] <= limit:
            cut = self._borders.popleft()
        return cut[0] - self._first_pos, cut[1] - self._text_chars_taken
