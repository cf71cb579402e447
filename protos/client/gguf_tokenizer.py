"""A GGUF file's vocabulary -> `tokenizer.json` of the `tokenizers` library.

Byte-level BPE only. Writes plain JSON and needs no tokenizer library. Guards: token ids in the JSON are the file's own.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from protos.service.gguf_header import Value, shown
from protos.wire.errors import InvalidModelFile, UnsupportedFeature

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Values of `tokenizer.ggml.token_type`."""

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES_ONLY = {**_BYTE_LEVEL, "use_regex": False}


def _split(pattern: str) -> dict[str, Any]:
    """Cut with a regular expression first; bytes are mapped afterwards."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _BYTES_ONLY]}


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_PRE_TOKENIZERS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "gpt-2": _BYTE_LEVEL,
        "smollm": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
        },
        "qwen2": _split(_WORDS % ""),
        "llama-bpe": _split(_WORDS % "{1,3}"),
    }
)
"""By `tokenizer.ggml.pre`."""
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe"})
"""A word that is a token is taken as it is, without merges."""
_NORMALISED = frozenset({"qwen2"})
"""Text is brought to Unicode NFC first."""


def tokenizer_json(metadata: Mapping[str, Value]) -> bytes:
    """The bytes of `tokenizer.json`.

    Raises:
        UnsupportedFeature: another tokenizer model or pre-tokenizer.
        InvalidModelFile: the vocabulary is missing or contradicts itself.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedFeature(
            f"tokenizer.ggml.model is {shown(model)}, supported: 'gpt2'", field="tokenizer.ggml.model"
        )
    kind = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if not isinstance(kind, str) or kind not in _PRE_TOKENIZERS:
        message = f"tokenizer.ggml.pre is {shown(kind)}, supported: {', '.join(_PRE_TOKENIZERS)}"
        raise UnsupportedFeature(message, field="tokenizer.ggml.pre")
    tokens, types = _vocabulary(metadata)
    layout = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types),
        "normalizer": {"type": "NFC"} if kind in _NORMALISED else None,
        "pre_tokenizer": _PRE_TOKENIZERS[kind],
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": kind in _WHOLE_WORDS_FIRST,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": _merges(metadata),
        },
    }
    return json.dumps(layout, ensure_ascii=False, separators=(",", ":")).encode()


def _vocabulary(metadata: Mapping[str, Value]) -> tuple[tuple[str, ...], np.ndarray]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, tuple) or not tokens:
        raise InvalidModelFile("tokenizer.ggml.tokens is missing or no list of texts", field="tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise InvalidModelFile("tokenizer.ggml.tokens holds a token twice", field="tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return tokens, np.full(len(tokens), NORMAL)
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        message = f"tokenizer.ggml.token_type must hold one number for each of {len(tokens)} tokens"
        raise InvalidModelFile(message, field="tokenizer.ggml.token_type")
    return tokens, types


def _added_tokens(tokens: tuple[str, ...], types: np.ndarray) -> list[dict[str, Any]]:
    """Tokens that are matched in text before anything else; control tokens are special."""
    return [
        {
            "id": int(index),
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": bool(types[index] == CONTROL),
        }
        for index in np.flatnonzero((types == CONTROL) | (types == USER_DEFINED))
    ]


def _merges(metadata: Mapping[str, Value]) -> list[list[str]]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, tuple):
        raise InvalidModelFile("tokenizer.ggml.merges is missing or no list of texts", field="tokenizer.ggml.merges")
    pairs = [merge.split(" ") for merge in merges]
    for index, pair in enumerate(pairs):
        if len(pair) != 2 or not all(pair):
            message = f"tokenizer.ggml.merges[{index}] is no pair of tokens"
            raise InvalidModelFile(message, field="tokenizer.ggml.merges")
    return pairs
