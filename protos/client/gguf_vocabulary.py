"""The vocabulary in a GGUF file's metadata: tokens, their kinds, and those that are matched in text first."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from protos.service.gguf_header import Value
from protos.wire.errors import InvalidModelFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of `tokenizer.ggml.token_type`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vocabulary:
    """Checked: every token is there once and has a kind."""

    tokens: tuple[str, ...]
    """By id."""
    types: np.ndarray
    """[len(tokens)] int"""

    def ids(self) -> dict[str, int]:
        """Id by token."""
        return {token: index for index, token in enumerate(self.tokens)}

    def added_tokens(self) -> list[dict[str, Any]]:
        """Tokens that are matched in text before anything else, as in `tokenizer.json`; control tokens are special."""
        return [
            {
                "id": int(index),
                "content": self.tokens[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": bool(self.types[index] == CONTROL),
            }
            for index in np.flatnonzero((self.types == CONTROL) | (self.types == USER_DEFINED))
        ]


def read_vocabulary(metadata: Mapping[str, Value]) -> Vocabulary:
    """The vocabulary of `metadata`.

    Raises:
        InvalidModelFile: it is missing or contradicts itself.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, tuple) or not tokens:
        raise InvalidModelFile("tokenizer.ggml.tokens is missing or no list of texts", field="tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise InvalidModelFile("tokenizer.ggml.tokens holds a token twice", field="tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return Vocabulary(tokens=tokens, types=np.full(len(tokens), NORMAL))
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        message = f"tokenizer.ggml.token_type must hold one number for each of {len(tokens)} tokens"
        raise InvalidModelFile(message, field="tokenizer.ggml.token_type")
    return Vocabulary(tokens=tokens, types=types)
