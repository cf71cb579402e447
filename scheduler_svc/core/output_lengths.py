"""How long outputs become, learnt from those that ended: most end long before the most tokens they may have.

An output is taken to end by itself with the same chance at every token. Pure.
"""

import math

_FIRST_TOKENS = 256.0
"""Mean length of an output that may be of any length, before anything is known."""
_MEMORY = 0.99
"""Weight that an output keeps with each later one."""
_LEAST_CHANCE = 1e-9


class OutputLengths:
    """Owned by the scheduling state."""

    def __init__(self) -> None:
        self._ends = 1.0
        self._tokens = _FIRST_TOKENS

    def ended(self, tokens: int, *, by_itself: bool) -> None:
        """An output of so many tokens is over: by itself, or because it was cut off."""
        self._ends = self._ends * _MEMORY + by_itself
        self._tokens = self._tokens * _MEMORY + tokens

    def expected(self, most_tokens: int) -> float:
        """Tokens that an output, or the rest of one, has when it may have at most so many."""
        chance = self._ends / self._tokens
        if chance * most_tokens < _LEAST_CHANCE:
            return most_tokens
        return -math.expm1(-chance * most_tokens) / chance
