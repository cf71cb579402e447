"""Checked values of a hub folder's `config.json`, refused by the key that holds them."""

from typing import Any

from protos.service.gguf_header import said
from protos.wire.errors import InvalidModelFile, UnsupportedFeature


def number(value: Any, key: str) -> int | float:
    """The value, if it is a number.

    Raises:
        InvalidModelFile: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidModelFile(f"{key} {said(value)}, must be a number", field=key)
    return value


def integer(value: Any, key: str, *, low: int, high: int) -> int:
    """The value, if it is an integer of an interval.

    Raises:
        InvalidModelFile: it is not.
    """
    if type(value) is not int or not low <= value <= high:
        raise InvalidModelFile(f"{key} {said(value)}, must be {low} to {high}", field=key)
    return value


def one_of(value: Any, key: str, allowed: tuple[Any, ...]) -> None:
    """Refuse every other value than those the worker's layers compute.

    Raises:
        UnsupportedFeature: it is another.
    """
    if value not in allowed:
        names = ", ".join("absent" if item is None else str(item).lower() for item in allowed)
        raise UnsupportedFeature(f"{key} {said(value)}, supported: {names}", field=key)
