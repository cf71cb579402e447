"""What JSON may cost to read, from its bytes: two characters can be an object of 72 bytes.

An estimate from above, made by counting, so that a file of strangers is refused before it is read.
"""

from protos.wire.errors import InvalidModelFile

_TEXT = 56
"""Bytes of a short text, of which a pair of quotes is one."""
_LIST = 80
"""Of an empty list or object with its place in another."""
_PLACE = 32
"""Of a number or a reference and its place."""


def check_json_cost(content: bytes, *, limit: int, name: str, field: str) -> None:
    """Refuse `content` before it is read; `name` says what it is.

    Raises:
        InvalidModelFile: it would take more than `limit` bytes.
    """
    cost = json_cost(content)
    if cost > limit:
        raise InvalidModelFile(f"{name} takes {cost} bytes to read, limit {limit}", field=field)


def json_cost(content: bytes) -> int:
    """Bytes that the values in `content` take once they are read, the content itself included."""
    lists = content.count(b"[") + content.count(b"{")
    places = content.count(b",") + content.count(b":")
    texts = content.count(b'"') // 2
    return 2 * len(content) + _LIST * lists + _TEXT * texts + _PLACE * places
