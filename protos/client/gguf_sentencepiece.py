"""A SentencePiece vocabulary with scores, from a GGUF file -> the layout of `tokenizer.json`.

SentencePiece joins, again and again, the two neighbours whose joint piece has the best score; the `tokenizers` library
joins by a list of pairs. So the list is every way to cut a piece in two pieces, best score first. Blanks are U+2581;
bytes of what no piece covers are tokens of their own; pieces that users defined are matched in text first.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from protos.client.gguf_vocabulary import NORMAL, UNKNOWN, Vocabulary, read_vocabulary
from protos.service.gguf_header import Value, shown
from protos.wire.errors import InvalidModelFile

BLANK = "\N{LOWER ONE EIGHTH BLOCK}"
MAX_PIECE_CHARACTERS = 256
"""Longer ones cannot come from merges: a hostile vocabulary would make their number grow with the square."""
_UNKNOWN_KEY = "tokenizer.ggml.unknown_token_id"


def sentencepiece_layout(metadata: Mapping[str, Value]) -> dict[str, Any]:
    """The whole of `tokenizer.json`.

    Raises:
        InvalidModelFile: vocabulary or scores are missing or contradict each other.
    """
    vocabulary = read_vocabulary(metadata)
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    prefix = [{"type": "Prepend", "prepend": BLANK}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    to_blanks = {"type": "Replace", "pattern": {"String": BLANK}, "content": " "}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, blanks]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [to_blanks, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": _unknown_token(metadata, vocabulary),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary.ids(),
            "merges": _merges(vocabulary, _scores(metadata, vocabulary)),
        },
    }


def _unknown_token(metadata: Mapping[str, Value], vocabulary: Vocabulary) -> str | None:
    value = metadata.get(_UNKNOWN_KEY)
    if value is None:
        unknown = np.flatnonzero(vocabulary.types == UNKNOWN)
        return vocabulary.tokens[unknown[0]] if len(unknown) else None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(vocabulary.tokens):
        message = f"{_UNKNOWN_KEY} is {shown(value)}, must be an integer from 0 to {len(vocabulary.tokens) - 1}"
        raise InvalidModelFile(message, field=_UNKNOWN_KEY)
    return vocabulary.tokens[value]


def _scores(metadata: Mapping[str, Value], vocabulary: Vocabulary) -> np.ndarray:
    field = "tokenizer.ggml.scores"
    scores = metadata.get(field)
    count = len(vocabulary.tokens)
    if not isinstance(scores, np.ndarray) or len(scores) != count or not bool(np.isfinite(scores).all()):
        raise InvalidModelFile(f"{field} must hold one finite number for each of {count} tokens", field=field)
    return scores


def _merges(vocabulary: Vocabulary, scores: np.ndarray) -> list[list[str]]:
    """Best score first; of one piece, the cut whose parts have the lowest ids first."""
    normal = np.flatnonzero(vocabulary.types == NORMAL)
    ids = {vocabulary.tokens[index]: int(index) for index in normal}
    merges: list[list[str]] = []
    for index in normal[np.argsort(-scores[normal], kind="stable")]:
        piece = vocabulary.tokens[index]
        if len(piece) > MAX_PIECE_CHARACTERS:
            continue
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [(left, right) for left, right in halves if left in ids and right in ids]
        merges += [list(pair) for pair in sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    return merges
