"""What a message says of data that does not fit its schema: the first problem, and where it is."""

from typing import NamedTuple

from pydantic import ValidationError


class Problem(NamedTuple):
    """For a message."""

    place: str
    """Keys and numbers with dots between them; `content` if it is the whole."""
    text: str


def first_problem(error: ValidationError) -> Problem:
    """The one that was found first."""
    first = error.errors()[0]
    return Problem(".".join(str(part) for part in first["loc"]) or "content", first["msg"])
