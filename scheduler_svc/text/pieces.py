"""What each token id contributes to text, independent of its neighbours.

Reads a tokenizer's decoder settings; knows nothing of streams. A table fills on demand and is shared by all requests.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from protos.wire.errors import InvalidModelFile

_FIELD = "tokenizer.json"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class ByteLevelPieces:
    """Pieces of a byte-level tokenizer: bytes, to be joined and then read as UTF-8."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes_of_char = _byte_alphabet()
        self._pieces: dict[int, bytes] = {}

    def piece(self, token_id: int) -> bytes:
        """Bytes of `token_id`; empty when the tokenizer has no such id."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make(token_id)
        return piece

    def _make(self, token_id: int) -> bytes:
        token = _token(self._tokenizer, token_id)
        try:
            return bytes(self._bytes_of_char[char] for char in token)
        except KeyError:
            # As the library does: a token with any character outside the byte alphabet stands for itself.
            return token.encode()


class ByteFallbackPieces:
    """Pieces of a tokenizer with byte fallback: text, or one raw byte that belongs to a run of raw bytes."""

    def __init__(self, tokenizer: Tokenizer, *, replacements: Sequence[tuple[str, str]], strip_left: int) -> None:
        """Wrap the tokenizer.

        Args:
            tokenizer: the library's object.
            replacements: (pattern, content) pairs applied to each token, in order.
            strip_left: blanks taken off the beginning of a whole text.
        """
        self._tokenizer = tokenizer
        self._replacements = tuple(replacements)
        self._pieces: dict[int, str | int] = {}
        self.strip_left = strip_left

    def piece(self, token_id: int) -> str | int:
        """Text of `token_id`, or the value of its raw byte; empty text when the tokenizer has no such id."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make(token_id)
        return piece

    def _make(self, token_id: int) -> str | int:
        token = _token(self._tokenizer, token_id)
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        raw = _BYTE_TOKEN.match(token)
        return int(raw[1], 16) if raw else token


def pieces_of(tokenizer: Tokenizer, layout: Mapping[str, Any]) -> ByteLevelPieces | ByteFallbackPieces:
    """The table that fits the decoder described by `layout`, a parsed `tokenizer.json`.

    Raises:
        InvalidModelFile: a decoder that cannot be streamed exactly by this release.
    """
    decoder = layout.get("decoder") or {}
    steps = decoder.get("decoders") or [] if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelPieces(tokenizer)
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return _byte_fallback(tokenizer, steps)
    raise InvalidModelFile(f"decoder {kinds} of tokenizer.json is not supported", field=_FIELD)


def _token(tokenizer: Tokenizer, token_id: int) -> str:
    """The vocabulary's string for `token_id`; empty when there is none."""
    # The library knows 32-bit ids only.
    return (tokenizer.id_to_token(token_id) or "") if 0 <= token_id < 1 << 32 else ""


def _byte_fallback(tokenizer: Tokenizer, steps: Sequence[Mapping[str, Any]]) -> ByteFallbackPieces:
    replacements: list[tuple[str, str]] = []
    strip_left = 0
    for step in steps:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or strip_left:
                raise InvalidModelFile("a pattern of tokenizer.json's decoder is not supported", field=_FIELD)
            replacements.append((pattern, step["content"]))
        elif step["type"] == "Strip":
            if step["content"] != " " or step["stop"] != 0:
                raise InvalidModelFile("a strip of tokenizer.json's decoder is not supported", field=_FIELD)
            strip_left = int(step["start"])
    return ByteFallbackPieces(tokenizer, replacements=replacements, strip_left=strip_left)


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies, to that byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [value for value in range(256) if value not in printable]
    alphabet = {chr(value): value for value in printable}
    alphabet.update({chr(256 + index): value for index, value in enumerate(others)})
    return alphabet
