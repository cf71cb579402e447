"""Finds the first of several stop strings in text that arrives in parts.

Knows nothing of tokens. The match that *ends* first wins; of those that end at the same character, the longest.
"""

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string that was found."""

    stop_string: str
    end: int
    """Characters of the part just fed, up to and including the match."""


class StopMatcher:
    """The stop strings of one stream. Made per request; useless after its first match."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._fallbacks = [_fallbacks(stop_string) for stop_string in self._stop_strings]
        self._matched = [0] * len(self._stop_strings)
        self._first_chars = frozenset(stop_string[0] for stop_string in self._stop_strings)
        self._hold = 0

    @property
    def hold(self) -> int:
        """Characters at the end of all text so far that may be the beginning of a stop string."""
        return self._hold

    def feed(self, part: str) -> StopMatch | None:
        """Take the next part of the text; the match that it completes, if any."""
        if not self._hold and self._first_chars.isdisjoint(part):
            return None
        for index, char in enumerate(part):
            found = self._advance(char)
            if found is not None:
                return StopMatch(found, index + 1)
        self._hold = max(self._matched, default=0)
        return None

    def _advance(self, char: str) -> str | None:
        longest: str | None = None
        for which, stop_string in enumerate(self._stop_strings):
            matched = self._matched[which]
            while matched and stop_string[matched] != char:
                matched = self._fallbacks[which][matched - 1]
            if stop_string[matched] == char:
                matched += 1
            if matched == len(stop_string):
                if longest is None or matched > len(longest):
                    longest = stop_string
                matched = self._fallbacks[which][matched - 1]
            self._matched[which] = matched
        return longest


def _fallbacks(pattern: str) -> list[int]:
    """Knuth-Morris-Pratt: per prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return table
