"""What JSON may cost to read, from its bytes: two characters can be an object of 72 bytes.

An estimate from above, made by counting, so that a file of strangers is refused before it is read.
"""

_TEXT = 56
"""Bytes of a short text, of which a pair of quotes is one."""
_LIST = 80
"""Of an empty list or object with its place in another."""
_PLACE = 32
"""Of a number or a reference and its place."""


def json_cost(content: bytes) -> int:
    """Bytes that the values in `content` take once they are read, the content itself included."""
    lists = content.count(b"[") + content.count(b"{")
    places = content.count(b",") + content.count(b":")
    texts = content.count(b'"') // 2
    return 2 * len(content) + _LIST * lists + _TEXT * texts + _PLACE * places
