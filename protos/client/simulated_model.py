"""The built-in model of simulated workers: a card, a tokenizer of made-up words and a chat template; no weights.

Needs no download. Its weight file is a GGUF header without tensors, so that every other device refuses it by name.
"""

import hashlib
import json
import struct
from itertools import islice, product
from pathlib import Path
from typing import Any

from protos.client.build_folder import complete_folder, fresh_folder
from protos.service.model_files import (
    CARD_FILE,
    NOTICE_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    ModelCard,
    ModelFolder,
    encode_card,
    read_model_folder,
)

SIMULATED_MODEL = "simulated-8b"
ARCHITECTURE = "simulated"
CONTEXT_TOKENS = 131_072
VOCAB_SIZE = 8192
SPECIAL_TOKENS = ("<|user|>", "<|assistant|>", "<|end|>")
"""The last ids of the vocabulary; the last one ends a sequence."""

_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_NOTICE = "Made by forwardplane. No weights: tokens of a simulated device have no meaning.\n"
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_STRING_KIND = 8


def simulated_folder(target: Path) -> ModelFolder:
    """The folder of the built-in model at `target`, written if it is not there or is another release's.

    Raises:
        UnavailableError: the cache cannot be written.
    """
    tokenizer, weights = _tokenizer_json(), _empty_gguf()
    card = ModelCard(
        name=SIMULATED_MODEL,
        architecture=ARCHITECTURE,
        context_tokens=CONTEXT_TOKENS,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(VOCAB_SIZE - 1,),
        weights_fingerprint=hashlib.sha256(weights).hexdigest(),
        tokenizer_fingerprint=hashlib.sha256(tokenizer).hexdigest(),
    )
    found = complete_folder(target)
    if found is not None and found.card == card:
        return found
    with fresh_folder(target) as folder:
        (folder / WEIGHTS_FILE).write_bytes(weights)
        (folder / TOKENIZER_FILE).write_bytes(tokenizer)
        (folder / TEMPLATE_FILE).write_text(_TEMPLATE, encoding="utf-8")
        (folder / NOTICE_FILE).write_text(_NOTICE, encoding="utf-8")
        (folder / CARD_FILE).write_bytes(encode_card(card))
    return read_model_folder(target)


def _tokenizer_json() -> bytes:
    """Byte-level: every byte, then words that are one token each with the blank before them, then special tokens."""
    tokens = [*_byte_alphabet(), *islice(_words(), VOCAB_SIZE - 256 - len(SPECIAL_TOKENS)), *SPECIAL_TOKENS]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    layout: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token, vocabulary[token]) for token in SPECIAL_TOKENS],
        "normalizer": None,
        "pre_tokenizer": _BYTE_LEVEL,
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
            "ignore_merges": True,
            "vocab": vocabulary,
            "merges": [],
        },
    }
    return json.dumps(layout, ensure_ascii=False, separators=(",", ":")).encode()


def _added(token: str, index: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, **flags, "special": True}


def _byte_alphabet() -> list[str]:
    """The character that byte-level vocabularies write for each byte."""
    printable = {*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(value) if value in printable else chr(next(others)) for value in range(256)]


def _words() -> "map[str]":
    """Two syllables and the blank before them, ` baba`, ` babe` and so on."""
    syllables = [consonant + vowel for consonant, vowel in product("bcdfghjklmnpqrstvwxz", "aeiou")]
    return map("Ġ{0[0]}{0[1]}".format, product(syllables, syllables))


def _empty_gguf() -> bytes:
    """A header with the architecture's name and no tensor."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    entry = text("general.architecture") + struct.pack("<I", _STRING_KIND) + text(ARCHITECTURE)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry
