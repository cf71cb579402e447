"""What a grammar is to us: a kind and a text. Knows nothing of who asks or of the library that compiles it."""

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class GrammarKind(StrEnum):
    """How the text is to be read. The words are the fields of a caller's request."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"
    """The text is a JSON list of texts."""


class GrammarSource(NamedTuple):
    """Equal ones are compiled once."""

    kind: GrammarKind
    text: str


def choice_source(texts: Sequence[str]) -> GrammarSource:
    """The grammar whose output is one of `texts`."""
    return GrammarSource(GrammarKind.CHOICE, json.dumps(list(texts)))
