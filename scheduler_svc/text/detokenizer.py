"""Ids to text, one id at a time, exactly as the tokenizer decodes the whole.

Knows nothing of stop strings or of what was sent. Guards: the parts of one stream, joined, are `decode(all ids)`; a
part never ends inside a character. Each id costs O(1).
"""

import codecs
from collections.abc import Callable
from typing import NamedTuple, Protocol

from scheduler_svc.text.pieces import ByteFallbackPieces

_REPLACEMENT = "\ufffd"
_SURROGATE_LEAD = b"\xed"
_SURROGATE_SECOND = b"\xa0"


class Decoded(NamedTuple):
    """What one id settled."""

    settled: str
    """Text of the ids before this one that only now is known; they end at a character border."""
    text: str
    """Text that this id completes."""
    is_open: bool
    """This id ends inside a character: its text is not complete."""


class IncrementalDecoder(Protocol):
    """The decoder of one stream. Made per request, lives as long as it."""

    def push(self, token_id: int) -> Decoded:
        """Take the next id."""
        ...

    def finish(self) -> str:
        """The text of what is still open, after the last id."""
        ...


class ByteLevelDecoder:
    """For byte-level tokenizers. Invalid bytes become U+FFFD, one per maximal invalid part, as in the library."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._open_bytes = b""

    def push(self, token_id: int) -> Decoded:
        """Take the next id."""
        piece = self._piece(token_id)
        settled = ""
        if self._open_bytes and piece and not _continues(self._open_bytes, piece):
            settled = _REPLACEMENT
            self._open_bytes = b""
        text, self._open_bytes = _read(self._open_bytes + piece)
        return Decoded(settled, text, bool(self._open_bytes))

    def finish(self) -> str:
        """The text of what is still open, after the last id."""
        rest, self._open_bytes = self._open_bytes, b""
        return rest.decode("utf-8", "replace")


class ByteFallbackDecoder:
    """For tokenizers with byte fallback: a run of raw bytes is text if it is valid as a whole, else U+FFFD per byte.

    So a run stays open until an id that is not a raw byte follows it.
    """

    def __init__(self, piece: Callable[[int], str | int], *, strip_left: int) -> None:
        self._piece = piece
        self._blanks_to_strip = strip_left
        self._run = bytearray()

    def push(self, token_id: int) -> Decoded:
        """Take the next id."""
        piece = self._piece(token_id)
        if isinstance(piece, int):
            self._run.append(piece)
            return Decoded("", "", is_open=True)
        if not piece:
            return Decoded("", "", bool(self._run))
        settled = self.finish()
        return Decoded(settled, self._stripped(piece), is_open=False)

    def finish(self) -> str:
        """The text of what is still open, after the last id."""
        if not self._run:
            return ""
        run = bytes(self._run)
        self._run.clear()
        try:
            return self._stripped(run.decode())
        except UnicodeDecodeError:
            return self._stripped(_REPLACEMENT * len(run))

    def _stripped(self, text: str) -> str:
        while self._blanks_to_strip and text:
            if text[0] != " ":
                self._blanks_to_strip = 0
                break
            text = text[1:]
            self._blanks_to_strip -= 1
        return text


def byte_level_decoder(pieces: Callable[[int], bytes], *, skipped: frozenset[int]) -> ByteLevelDecoder:
    """A decoder of one stream that leaves out the ids in `skipped`."""
    return ByteLevelDecoder(lambda token_id: b"" if token_id in skipped else pieces(token_id))


def byte_fallback_decoder(pieces: ByteFallbackPieces, *, skipped: frozenset[int]) -> ByteFallbackDecoder:
    """A decoder of one stream that leaves out the ids in `skipped`."""

    def piece(token_id: int) -> str | int:
        return "" if token_id in skipped else pieces.piece(token_id)

    return ByteFallbackDecoder(piece, strip_left=pieces.strip_left)


def _read(known: bytes) -> tuple[str, bytes]:
    """The text of `known`, and the bytes at its end that begin a character."""
    text, used = _decode_utf8(known, errors="replace")
    rest = known[used:]
    # CPython waits for the third byte of an encoded surrogate, which is broken at its second already.
    if rest[:1] == _SURROGATE_LEAD and rest[1:2] >= _SURROGATE_SECOND:
        return text + _REPLACEMENT * 2, b""
    return text, rest


def _continues(open_bytes: bytes, piece: bytes) -> bool:
    """Whether the first byte of `piece` belongs to the character that `open_bytes` begins."""
    if open_bytes == _SURROGATE_LEAD and piece[:1] >= _SURROGATE_SECOND:
        return False
    try:
        _decode_utf8(open_bytes + piece[:1], errors="strict")
    except UnicodeDecodeError:
        return False
    return True


def _decode_utf8(known: bytes, *, errors: str) -> tuple[str, int]:
    """Text of `known` without an unfinished last character, and the bytes that were used."""
    is_final = False
    return codecs.utf_8_decode(known, errors, is_final)
