"""A GGUF file's vocabulary -> `tokenizer.json` of the `tokenizers` library.

Byte-level BPE here, SentencePiece in a module of its own. Writes plain JSON and needs no tokenizer library. Guards:
token ids in the JSON are the file's own.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from protos.client.gguf_sentencepiece import sentencepiece_layout
from protos.client.gguf_vocabulary import read_vocabulary
from protos.service.gguf_header import Value, shown
from protos.wire.errors import InvalidModelFile, UnsupportedFeature

_BYTE_LEVEL_MODEL, _SENTENCEPIECE_MODEL = "gpt2", "llama"
"""Values of `tokenizer.ggml.model`."""

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
    if model == _SENTENCEPIECE_MODEL:
        layout = sentencepiece_layout(metadata)
    elif model == _BYTE_LEVEL_MODEL:
        layout = _byte_level_layout(metadata)
    else:
        message = f"tokenizer.ggml.model is {shown(model)}, supported: 'gpt2', 'llama'"
        raise UnsupportedFeature(message, field="tokenizer.ggml.model")
    return json.dumps(layout, ensure_ascii=False, separators=(",", ":")).encode()


def _byte_level_layout(metadata: Mapping[str, Value]) -> dict[str, Any]:
    kind = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if not isinstance(kind, str) or kind not in _PRE_TOKENIZERS:
        message = f"tokenizer.ggml.pre is {shown(kind)}, supported: {', '.join(_PRE_TOKENIZERS)}"
        raise UnsupportedFeature(message, field="tokenizer.ggml.pre")
    vocabulary = read_vocabulary(metadata)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
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
            "vocab": vocabulary.ids(),
            "merges": _merges(metadata),
        },
    }


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
