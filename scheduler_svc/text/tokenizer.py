"""Text to ids and back, from a model folder's `tokenizer.json`.

Wraps the `tokenizers` library. Knows nothing of prompts, templates or requests.
"""

import json
import string
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenizers import Tokenizer

from protos.service.json_cost import check_json_cost
from protos.wire.errors import InvalidModelFile
from scheduler_svc.text.detokenizer import IncrementalDecoder, byte_fallback_decoder, byte_level_decoder
from scheduler_svc.text.pieces import ByteFallbackPieces, ByteLevelPieces, pieces_of

_FIELD = "tokenizer.json"
MAX_TOKENIZER_BYTES = 64 << 20
MAX_TOKENIZER_COST = 320 << 20
"""Memory that reading it may take: twice what the largest vocabularies in use (262,144 tokens) need."""

_CERTAIN = string.ascii_letters + string.digits
_PROBE = string.printable + "é€🙂\U0010ffff"
"""Of every length in UTF-8; hardly any vocabulary has the last one."""


class TextTokenizer:
    """Made once at start, shared by all requests. Its slow calls release the interpreter lock."""

    def __init__(
        self, tokenizer: Tokenizer, pieces: ByteLevelPieces | ByteFallbackPieces, *, keeps_bytes: bool = False
    ) -> None:
        """Join the parts.

        Args:
            tokenizer: the library's.
            pieces: what its ids stand for.
            keeps_bytes: it is byte-level and changes no text before it cuts it.
        """
        self._tokenizer = tokenizer
        self._longest_bytes = _longest_bytes(tokenizer) if keeps_bytes else None
        self._pieces = pieces
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def from_file(cls, path: Path) -> "TextTokenizer":
        """The tokenizer of a model folder.

        Raises:
            InvalidModelFile: not a tokenizer file, or one whose decoder this release cannot stream.
        """
        try:
            content = _content(path)
            text = content.decode()
            layout = json.loads(text)
        except FileNotFoundError as error:
            raise InvalidModelFile("the model folder has no tokenizer.json", field=_FIELD) from error
        except (ValueError, OSError, RecursionError) as error:
            raise InvalidModelFile("tokenizer.json cannot be read as JSON", field=_FIELD) from error
        if not isinstance(layout, dict):
            raise InvalidModelFile("tokenizer.json does not hold an object", field=_FIELD)
        tokenizer = _parse(text)
        pieces = pieces_of(tokenizer, layout)
        keeps_bytes = isinstance(pieces, ByteLevelPieces) and layout.get("normalizer") is None
        return cls(tokenizer, pieces, keeps_bytes=keeps_bytes)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that the tokenizer marks as special."""
        return self._special_ids

    def token(self, token_id: int) -> str:
        """The vocabulary's own name of an id.

        Raises:
            InvalidModelFile: there is no such id.
        """
        token: str | None = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if token is None:
            raise InvalidModelFile(f"tokenizer.json has no token {token_id}", field=_FIELD)
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """What an id stands for, special ones too: UTF-8, or a part of a character. Empty when there is no such id."""
        piece = self._pieces.piece(token_id)
        if isinstance(piece, int):
            return bytes([piece])
        return piece.encode() if isinstance(piece, str) else piece

    def least_tokens(self, text: str) -> int:
        """A number that the ids of `text` are not below, at little cost; 0 when nothing can be said."""
        if self._longest_bytes is None:
            return 0
        # Only letters and digits count: every vocabulary has them, while some lack other bytes, which are dropped.
        return sum(text.count(char) for char in _CERTAIN) // self._longest_bytes

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing added."""
        # The batch call is the one that releases the interpreter lock.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, keep_special: bool) -> str:
        """Text of all of `ids` at once."""
        texts: list[str] = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=not keep_special)
        return texts[0]

    def decoder(self, *, keep_special: bool, silent_ids: frozenset[int] = frozenset()) -> IncrementalDecoder:
        """A fresh decoder of one stream.

        Args:
            keep_special: special tokens give their text.
            silent_ids: ids that give no text in any case.
        """
        skipped = silent_ids if keep_special else silent_ids | self._special_ids
        if isinstance(self._pieces, ByteLevelPieces):
            return byte_level_decoder(self._pieces.piece, skipped=skipped)
        return byte_fallback_decoder(self._pieces, skipped=skipped)


def _content(path: Path) -> bytes:
    """The file's bytes.

    Raises:
        InvalidModelFile: it is too large, or would be once it is read.
    """
    size = path.stat().st_size
    if size > MAX_TOKENIZER_BYTES:
        raise InvalidModelFile(f"tokenizer.json has {size} bytes, limit {MAX_TOKENIZER_BYTES}", field=_FIELD)
    content = path.read_bytes()
    check_json_cost(content, limit=MAX_TOKENIZER_COST, name="tokenizer.json", field=_FIELD)
    return content


def _longest_bytes(tokenizer: Tokenizer) -> int | None:
    """Of one id of a byte-level tokenizer; None: one may swallow any number of spaces."""
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    # Each character of the vocabulary's names stands for one byte; added tokens stand for themselves.
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if not vocabulary.keys() >= set(_CERTAIN):
        return None
    named = max(map(len, vocabulary))
    return max([named, *(len(token.content.encode()) for token in added)])


def _tried(text: str) -> Tokenizer:
    """A tokenizer that has encoded something: whether its parts fit each other shows only then."""
    tokenizer = Tokenizer.from_str(text)
    tokenizer.encode_batch_fast([_PROBE], add_special_tokens=False)
    return tokenizer


def _parse(text: str) -> Tokenizer:
    # The library raises a bare Exception for whatever it dislikes; a future hands it over as a value.
    with ThreadPoolExecutor(max_workers=1) as pool:
        parsed = pool.submit(_tried, text)
        failure = parsed.exception()
    if failure is not None:
        raise InvalidModelFile("tokenizer.json does not describe a tokenizer", field=_FIELD) from failure
    return parsed.result()
